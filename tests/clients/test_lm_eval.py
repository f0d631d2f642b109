"""lm-eval over HTTP gives what the same weights give in Hugging Face: log-likelihoods, greedy flags, generations."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients.conftest import Tool
from tests.system.oracle import Oracle
from tests.system.stack import Stack

pytestmark = [pytest.mark.clients, pytest.mark.system, pytest.mark.timeout(900)]

TASKS = Path(__file__).parent / "tasks"
MAX_TOKENS = 12


def docs(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def oracle(demo_model_dir: Path) -> Oracle:
    return Oracle(demo_model_dir)


@pytest.fixture(scope="module", params=["local tokenizer", "remote tokenizer"])
def samples(
    request: pytest.FixtureRequest,
    stack: Stack,
    tool: Tool,
    demo_model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    quick: bool,
) -> dict[str, list[dict[str, Any]]]:
    """lm-eval's samples by task, in the order of the documents."""
    if quick and request.param == "remote tokenizer":
        pytest.skip("no time for it with --quick")
    out, tasks = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("tasks")
    for name in ("capitals", "counting"):
        task = yaml.safe_load((TASKS / f"{name}.yaml").read_text())
        task["dataset_kwargs"]["data_files"]["test"] = str(TASKS / f"{name}.jsonl")
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(task))
    if request.param == "local tokenizer":
        tokenizer = f"tokenizer={demo_model_dir},tokenized_requests=True"
    else:
        tokenizer = "tokenizer_backend=remote,tokenized_requests=True"
    command = [
        *(str(tool("lm-eval", "lm_eval")), "run", "--model", "local-completions"),
        "--model_args",
        f"model=smollm2-135m,base_url={stack.base_url}/v1/completions,{tokenizer},max_length=2048,num_concurrent=2",
        *("--batch_size", "2", "--tasks", "baton_capitals,baton_counting", "--include_path", str(tasks)),
        *("--output_path", str(out), "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hf")}
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline}, cwd=out)
    print(run.stdout[-3000:], run.stderr[-5000:])
    assert run.returncode == 0
    found: dict[str, list[dict[str, Any]]] = {}
    for file in out.rglob("samples_*.jsonl"):
        task_name = "baton_capitals" if "capitals" in file.name else "baton_counting"
        found[task_name] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])
    return found


def test_log_likelihoods(samples: dict[str, list[dict[str, Any]]], oracle: Oracle, demo_model_dir: Path) -> None:
    """Of every option, and so the accuracy; which option is the likeliest is decided by the same numbers."""
    import tokenizers
    import torch

    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    correct, hits = 0.0, 0
    for doc, sample in zip(docs("capitals"), samples["baton_capitals"], strict=True):
        wanted = []
        context = tokenizer.encode(doc["question"]).ids
        for choice in doc["choices"]:
            ids = tokenizer.encode(f"{doc['question']} {choice}").ids
            assert ids[: len(context)] == context
            with torch.inference_mode():
                logits = oracle._model(torch.tensor([ids])).logits[0].double()
            values = logits.log_softmax(-1)
            places = range(len(context) - 1, len(ids) - 1)
            total = sum(values[place, ids[place + 1]].item() for place in places)
            wanted.append((total, all(values[place].argmax() == ids[place + 1] for place in places)))
        found = [(float(value), flag) for ((value, flag),) in sample["resps"]]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=1e-3)
        assert [flag in (True, "True") for _, flag in found] == [flag for _, flag in wanted]
        correct += sample["acc"]
        hits += max(range(3), key=lambda n: wanted[n][0]) == doc["answer"]
    assert correct == hits
    assert hits > 5


def test_generations(samples: dict[str, list[dict[str, Any]]], oracle: Oracle, demo_model_dir: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    checked = 0
    for doc, sample in zip(docs("counting"), samples["baton_counting"], strict=True):
        ids = oracle(tokenizer.encode(doc["prompt"]).ids, MAX_TOKENS)
        if ids is None:
            continue
        text = tokenizer.decode(ids)
        ends = [text.index(stop) for stop in ("\n", ".", "!", "?", ";") if stop in text]
        assert sample["resps"][0][0] == text[: min(ends, default=len(text))]
        checked += 1
    assert checked >= 4
