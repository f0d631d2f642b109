"""The split is real: counters say who computed what and how many bytes crossed, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.model_config import ModelConfig
from tests.system.oracle import Oracle
from tests.system.stack import Stack, running_stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

BLOCK = 16
Check = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="module", params=["ucx", "tcp"])
def stack(request: pytest.FixtureRequest, demo_model_dir: Path, oracle: Oracle) -> Iterator[Stack]:
    options = ("--transport", request.param, "--block-size", str(BLOCK), "--max-batch-tokens", "128")
    with running_stack(demo_model_dir, options=options) as running:
        running.transport = request.param  # type: ignore[attr-defined]
        yield running


def _counters(stack: Stack) -> dict[str, float]:
    return {
        "computed by P": stack.total("prefill", "baton_prefill_computed_tokens_total"),
        "computed by D": stack.total("decode", "baton_decode_computed_tokens_total"),
        "received by D": stack.total("decode", "baton_kv_bytes_received_total"),
        "sent by P": stack.total("prefill", "baton_kv_bytes_sent_total"),
    }


def test_d_computes_generated_tokens_only_and_receives_missing_blocks_only(
    stack: Stack, prompts: list[list[int]], demo_model_dir: Path, nothing_left: Check
) -> None:
    prompt = next(p for p in prompts if len(p) == 300)
    layout = ModelConfig.from_directory(demo_model_dir).kv_layout(BLOCK)
    stack.complete(prompts[0], 2)  # connections are open
    with nothing_left(stack):
        before = _counters(stack)
        stack.complete(prompt, 10, ignore_eos=True)
        first = _counters(stack)
        stack.complete(prompt, 10, ignore_eos=True)
        second = _counters(stack)
    num_blocks = -(-300 // BLOCK)
    assert first["computed by P"] - before["computed by P"] == 300
    # Token 0 comes from P; D computes the KV of the other inputs: one step for each further token.
    assert first["computed by D"] - before["computed by D"] == 9
    assert first["received by D"] - before["received by D"] == num_blocks * layout.block_bytes
    assert first["sent by P"] - before["sent by P"] == num_blocks * layout.block_bytes
    # The second time both caches hold the 18 full blocks: only the partial one is computed and sent.
    assert second["computed by P"] - first["computed by P"] == 300 - 18 * BLOCK
    assert second["received by D"] - first["received by D"] == layout.block_bytes
    assert second["computed by D"] - first["computed by D"] == 9


def test_the_configured_transport_is_in_use(stack: Stack, prompts: list[list[int]]) -> None:
    """Over UCX on one host the decode node copies out of the prefill node's pool."""
    wanted = stack.transport  # type: ignore[attr-defined]
    stack.complete(prompts[0], 2)
    for role in ("prefill", "decode"):
        for metrics in stack.node_metrics(role):
            schemes = {name.split("scheme=")[1].split(",")[0] for name in metrics if "kv_transport_info" in name}
            assert schemes == {wanted}
            lanes = [name.split("transport=")[1] for name in metrics if "kv_peer_transport_info" in name]
            assert [name.startswith("mapped+") for name in lanes] == [wanted == "ucx"]


def test_a_request_that_ends_at_token_0_never_runs_on_d(
    stack: Stack, prompts: list[list[int]], oracle: Oracle, nothing_left: Check
) -> None:
    """`max_tokens` 1, and a first token that is a stop token (TRT-LLM 16691, sglang 7147, vllm 46008)."""
    prompt = next(p for p in prompts if len(p) == 97)
    ids = oracle(prompt, 8)
    assert ids is not None
    stack.complete(prompts[0], 2)
    with nothing_left(stack):
        before = _counters(stack)
        one = stack.complete(prompt, 1)
        stopped = stack.complete(prompt, 8, stop_token_ids=[ids[0]])
        after = _counters(stack)
    assert one["choices"][0]["token_ids"] == ids[:1]
    assert one["choices"][0]["finish_reason"] == "length"
    assert stopped["choices"][0]["token_ids"] == ids[:1]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == ""
    assert after["computed by D"] == before["computed by D"]


def test_max_tokens_is_exact(stack: Stack, prompts: list[list[int]], oracle: Oracle, nothing_left: Check) -> None:
    prompt = prompts[-1]
    ids = oracle(prompt, 8)
    assert ids is not None
    stack.complete(prompts[0], 2)
    with nothing_left(stack):
        for limit in (1, 2, 3, 7):
            answer = stack.complete(prompt, limit)
            assert answer["choices"][0]["token_ids"] == ids[:limit]
            assert answer["usage"]["completion_tokens"] == limit


def test_seeded_sampling_does_not_depend_on_batch_mates(
    stack: Stack, prompts: list[list[int]], nothing_left: Check
) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 7, "ignore_eos": True}
    alone = stack.complete(prompts[-2], **body)["choices"][0]["token_ids"]
    mate = {"prompt": prompts[-3], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with nothing_left(stack):
        with stack.client() as client, client.stream("POST", "/v1/completions", json=mate) as other:
            next(other.iter_lines())  # the other request is running now
            together = stack.complete(prompts[-2], **body)["choices"][0]["token_ids"]
    assert together == alone


def test_clients_that_leave_free_everything(stack: Stack, prompts: list[list[int]], nothing_left: Check) -> None:
    stack.complete(prompts[0], 2)
    long = next(p for p in prompts if len(p) == 700)
    with nothing_left(stack):
        for prompt in (long, prompts[-1], long[:333]):
            with httpx.Client(base_url=stack.base_url, timeout=120, trust_env=False) as client:
                body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_lines())
            with httpx.Client(base_url=stack.base_url, timeout=0.2, trust_env=False) as hasty:
                with pytest.raises(httpx.TimeoutException):
                    hasty.post("/v1/completions", json={**body, "stream": False})
    answer = stack.complete(prompts[-1], 4)
    assert answer["usage"]["completion_tokens"] == 4
