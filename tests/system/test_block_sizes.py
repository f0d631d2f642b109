"""A prefill and a decode node with blocks of different sizes: ids are Hugging Face's all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cluster.membership import Role
from tests.system.oracle import Oracle
from tests.system.stack import Stack, running_stack, wait_for
from tests.system.test_token_exact import MAX_TOKENS, _ask_all

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

# (prefill's, decode's): the first divides the second, the second the first, neither the other.
SIZES = [(16, 32), (32, 16), (32, 48)]
MAX_PROMPTS = 14


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Prompts of as many different lengths as there are, with their answers; near ties are left out."""
    by_length = sorted({len(prompt): prompt for prompt in prompts}.values(), key=len)
    chosen = by_length[:: max(1, len(by_length) // MAX_PROMPTS)]
    found = [(prompt, ids) for prompt in chosen if (ids := oracle(prompt, MAX_TOKENS)) is not None]
    assert len(found) >= 8
    return found


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path, expected: object) -> Iterator[Stack]:
    with running_stack(demo_model_dir, options=("--max-batch-tokens", "100", "--block-size", "16")) as running:
        yield running


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_cold_and_with_prefix_hits(
    stack: Stack,
    demo_model_dir: Path,
    expected: list[tuple[list[int], list[int]]],
    nothing_left: Callable[..., AbstractContextManager[None]],
    ours: int,
    theirs: int,
) -> None:
    _have(stack, "prefill", ours, demo_model_dir)
    _have(stack, "decode", theirs, demo_model_dir)
    asyncio.run(_ask_all(stack, [[7, number] for number in range(16)]))  # connections are open
    with nothing_left(stack):
        for number in range(2):
            answers = asyncio.run(_ask_all(stack, [prompt for prompt, _ids in expected]))
            for (prompt, ids), answer in zip(expected, answers, strict=True):
                assert answer["choices"][0]["token_ids"] == ids, f"round {number}, prompt of {len(prompt)} tokens"
    assert stack.total("prefill", "baton_prefix_cached_tokens_total") > 0
    assert stack.total("decode", "baton_prompt_blocks_shared_total") > 0
    assert stack.total("decode", "baton_kv_digest_failures_total") == 0
    assert stack.total("decode", "baton_kv_transfers_total{direction=receive,outcome=done}") > len(expected)


def test_a_node_that_does_not_fit_is_refused_with_the_reason(stack: Stack, demo_model_dir: Path) -> None:
    """Last here: no pair is left."""
    old = [node_id for node_id, record in stack.records().items() if record.role == "decode"]
    options = ("--model", str(demo_model_dir), "--dtype", "bf16", "--kv-blocks", "100")
    stack.add_node("decode", "decode-bf16", *options)
    for node_id in old:
        stack.kill(node_id)
    wait_for("the old decode node is gone", lambda: stack.alive_nodes("decode") == 1)
    with stack.client() as client:
        ready = client.get("/ready")
        refused = client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2})
    assert ready.status_code == 503
    assert "do not fit: KV dtype float32 and bfloat16" in ready.json()["reason"]
    assert refused.status_code == 503
    assert "decode-bf16 and prefill node" in (stack.log_dir / "router.log").read_text()


def _have(stack: Stack, role: Role, block_size: int, model_dir: Path) -> None:
    """Exactly one node of that role, with blocks of that size: `baton up` starts all nodes with one size."""
    old = {node_id: record.block_size for node_id, record in stack.records().items() if record.role == role}
    if list(old.values()) == [block_size]:
        return
    options = ("--model", str(model_dir), "--block-size", str(block_size), "--max-batch-tokens", "100")
    stack.add_node(role, f"{role}-of-{block_size}", *options, "--kv-memory-gb", "0.5")
    for node_id in old:
        stack.kill(node_id)
    wait_for(
        f"the old {role} node is gone", lambda: stack.alive_nodes(role) == 1 and not old.keys() & stack.records().keys()
    )
