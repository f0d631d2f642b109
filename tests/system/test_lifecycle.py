"""Nodes come and go: a killed node is dropped at once, a new one is used, and a stop leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system.oracle import Oracle
from tests.system.stack import ROOT, Stack, running_stack, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture
def pair(demo_model_dir: Path) -> Iterator[Stack]:
    with running_stack(demo_model_dir, decode=2, options=("--transport", "ucx,tcp", "--threads", "1")) as running:
        yield running


def test_a_killed_decode_node_is_not_used_any_more(pair: Stack, prompts: list[list[int]], oracle: Oracle) -> None:
    """In-flight requests there end with an error, never with a cut 200; the next requests are right."""
    prompt = prompts[-1]
    ids = oracle(prompt, 8)
    before = pair.holdings()
    with pair.client() as client:
        body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            for _ in range(6):
                next(lines)
            busy = _busy_decode_node(pair)
            pair.kill(busy)
            rest = list(lines)
    assert any('"error"' in line for line in rest), rest[-5:]
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    wait_for("the router drops the node", lambda: pair.alive_nodes("decode") == 1)
    for _ in range(5):
        answer = pair.complete(prompt, 8)
        assert answer["choices"][0]["token_ids"] == ids
    wait_for("its record expires", lambda: busy not in pair.records())
    wait_for("the others have given everything back", lambda: _as_before(before, pair.holdings()))


def test_hits_on_either_node_alone_are_exact(pair: Stack, prompts: list[list[int]], oracle: Oracle) -> None:
    """A prefix hit on P only (D is new) and on D only (P is new)."""
    prompt = next(p for p in prompts if len(p) == 300)
    ids = oracle(prompt, 8)
    assert ids is not None
    for name in ("decode-0", "decode-1"):
        pair.kill(name)
    wait_for("no decode node is left", lambda: pair.alive_nodes("decode") == 0)
    refused = httpx.post(f"{pair.base_url}/v1/completions", json={"prompt": prompt}, timeout=30, trust_env=False)
    assert refused.status_code == 503
    assert "decode" in refused.json()["error"]["message"]
    model = str(_model_option(pair))
    pair.add_node("decode", "decode-a", "--model", model, "--kv-blocks", "200")
    assert pair.complete(prompt, 8)["choices"][0]["token_ids"] == ids  # cold
    pair.kill("decode-a")
    wait_for("decode-a is dropped", lambda: pair.alive_nodes("decode") == 0)
    pair.add_node("decode", "decode-b", "--model", model, "--kv-blocks", "200")
    on_p = pair.complete(prompt, 8)
    assert on_p["choices"][0]["token_ids"] == ids
    assert on_p["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
    assert pair.total("decode", "baton_prompt_blocks_shared_total") == 0
    pair.add_node("prefill", "prefill-b", "--model", model, "--kv-blocks", "200")
    pair.kill("prefill-0")
    wait_for("prefill-0 is dropped", lambda: pair.alive_nodes("prefill") == 1)
    on_d = pair.complete(prompt, 8)
    assert on_d["choices"][0]["token_ids"] == ids
    assert on_d["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert pair.total("decode", "baton_prompt_blocks_shared_total") == 18


def test_a_node_given_up_for_dead_comes_back_as_another_life(
    demo_model_dir: Path, prompts: list[list[int]], oracle: Oracle
) -> None:
    """A stopped process is never reported by a transport; when it goes on, its old life stays dead."""
    with running_stack(demo_model_dir, options=("--transport", "ucx")) as stack:
        ids = stack.complete(prompts[-1], 8)["choices"][0]["token_ids"]
        epoch = stack.records()["decode-0"].party.epoch
        os.kill(stack.pids["decode-0"], signal.SIGSTOP)
        wait_for("decode-0 is given up", lambda: stack.known_nodes("decode") == 0, 30)
        os.kill(stack.pids["decode-0"], signal.SIGCONT)
        wait_for("decode-0 is back", lambda: stack.alive_nodes("decode") == 1, 60)
        assert stack.records()["decode-0"].party.epoch != epoch
        assert stack.complete(prompts[-1], 8)["choices"][0]["token_ids"] == ids == oracle(prompts[-1], 8)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stop_leaves_no_process(demo_model_dir: Path, signum: signal.Signals) -> None:
    with running_stack(demo_model_dir, options=("--kv-blocks", "64")) as stack:
        processes = [psutil.Process(pid) for pid in stack.pids.values()]
        assert len(processes) == 4
        status = stack.stop(signum)
        assert status == (0 if signum != signal.SIGKILL else -signal.SIGKILL)
        _gone, alive = psutil.wait_procs(processes, timeout=15)
        assert not alive


def test_a_stop_while_starting_leaves_no_process(demo_model_dir: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "up", "--model", str(demo_model_dir), "--port", "0"]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = wait_for("children", lambda: len(c := psutil.Process(launcher.pid).children()) >= 3 and c, 60)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 130
    _gone, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


def _as_before(before: dict[str, object], after: dict[str, object]) -> bool:
    """What the surviving processes hold is what they held."""
    del after["nodes in Redis"]
    return all(before[name] == value for name, value in after.items())


def _busy_decode_node(stack: Stack) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for node_id, record in stack.records().items():
            if record.role == "decode" and stack.metrics(record.http_address)["baton_requests_running"] > 0:
                return node_id
    raise AssertionError("no decode node is busy")


def _model_option(stack: Stack) -> Path:
    arguments = psutil.Process(stack.pids["router"]).cmdline()
    return Path(arguments[arguments.index("--model") + 1])
