"""aiperf replays a scaled Mooncake trace and cancels half of it: nothing stays behind, and the next answer is right."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import Tool
from tests.system.stack import ROOT, Stack, wait_for

pytestmark = [pytest.mark.clients, pytest.mark.system, pytest.mark.timeout(900)]

TRACES = Path(os.environ.get("BATON_TRACES", ROOT.parent / "shared/traces"))
NUM_ROWS = 32
# Lengths by 32 and blocks of 16 tokens instead of 512: the same sharing of prefixes, for a small model.
SCALE, BLOCK = 32, 16
SPAN_MS = 8000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def trace_rows() -> list[dict[str, Any]]:
    """The first short rows of the trace, or as many made-up ones: turns of conversations with one beginning."""
    trace = TRACES / "mooncake/conversation_trace.jsonl"
    if trace.is_file():
        with trace.open() as lines:
            rows = [json.loads(line) for _, line in zip(range(10 * NUM_ROWS), lines, strict=False)]
        return [row for row in rows if row["input_length"] < 12_000][:NUM_ROWS]
    rng, rows = random.Random(5), []
    for number in range(NUM_ROWS):
        num_blocks = rng.randint(2, 20)
        # A last block that is not full is nobody else's, as in the real trace.
        hash_ids = [0, *(1000 * (number % 6) + place for place in range(1, num_blocks - 1)), 100_000 + number]
        length = 512 * (num_blocks - 1) + rng.randint(1, 512)
        row = {"timestamp": 300 * number, "input_length": length, "output_length": rng.randint(1, 1000)}
        rows.append(row | {"hash_ids": hash_ids})
    return rows


def scaled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = max(row["timestamp"] for row in rows) or 1
    return [
        {
            "timestamp": row["timestamp"] * SPAN_MS // last,
            "input_length": -(-row["input_length"] // SCALE),
            "output_length": max(1, -(-row["output_length"] // SCALE)),
            "hash_ids": row["hash_ids"],
        }
        for row in rows
    ]


def hub_with(tokenizer: Path, home: Path) -> None:
    """A Hugging Face cache that has the model's tokenizer as ``local/m135``: trace loaders take no path."""
    repository = home / "hub/models--local--m135"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in tokenizer.glob("*.json"):
        shutil.copy(file, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)


def held(stack: Stack) -> list[Any]:
    """Live requests, owned and orphaned blocks of every node."""
    found: list[Any] = []
    for record in stack.records().values():
        seen = httpx.get(f"{record.http_address}/debug/kv", trust_env=False).json()
        found += [*seen["requests"], *seen["blocks"], *seen["orphaned"]]
    return found


@pytest.mark.parametrize("cancelled", [0, 50])
def test_a_mooncake_trace(roomy: Stack, tool: Tool, demo_model_dir: Path, tmp_path: Path, cancelled: int) -> None:
    before = roomy.complete("The capital of France is", 12, temperature=0)["choices"][0]["token_ids"]
    rows = scaled(trace_rows())
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hub_with(demo_model_dir, tmp_path / "hf")
    command = [
        *(str(tool("aiperf", "aiperf")), "profile", "-m", "smollm2-135m", "--url", roomy.base_url),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", "local/m135", "--ui", "none"),
        *("--input-file", str(tmp_path / "trace.jsonl"), "--custom-dataset-type", "mooncake_trace"),
        *("--isl-block-size", str(BLOCK), "--fixed-schedule", "--extra-inputs", "ignore_eos:true"),
        *("--output-artifact-dir", str(tmp_path / "out")),
    ]
    if cancelled:
        command += ["--request-cancellation-rate", str(cancelled), "--request-cancellation-delay", "0.05"]
    alone = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **alone}, cwd=tmp_path)
    print(run.stdout[-5000:], run.stderr[-3000:])
    assert run.returncode == 0
    records = [json.loads(line) for line in (tmp_path / "out/profile_export.jsonl").read_text().splitlines()]
    complete = [record for record in records if not record.get("error")]
    if cancelled:
        assert len(records) == len(rows)
        assert 0 < len(complete) < len(rows)
    else:
        assert len(complete) == len(rows)
    wait_for("nothing held", lambda: held(roomy) == [])
    assert roomy.complete("The capital of France is", 12, temperature=0)["choices"][0]["token_ids"] == before
