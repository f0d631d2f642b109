"""A prompt's way through the prefill node: chunks, pushes, token 0, commit, acknowledgement."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prefill_bench import (
    BLOCK_SIZE,
    DECODE,
    ROUTER,
    SETTINGS,
    PrefillBench,
    key,
    make_submit,
    of_kind,
    sent_to,
    ticket_of,
)

from cluster.request import SamplingParams, TokenLogprobs
from cluster.wire import (
    Acknowledged,
    Cancel,
    Cancelled,
    Capsule,
    Commit,
    Failed,
    FirstToken,
    PenaltyCounts,
    Ping,
    Pong,
    StartedChoice,
    Token0,
)
from engine.instructions import CancelPush, FinishPush, Push
from engine.step import SampledToken, StepResult


def cancel(bench: PrefillBench) -> None:
    bench.message(Cancel(key()))
    bench.push_ended()


def acknowledge(bench: PrefillBench, name: str = "r") -> list[object]:
    return list(bench.message(Acknowledged(key(name)), DECODE))


def test_one_request_from_submit_to_release(bench: PrefillBench) -> None:
    assert bench.submit(10) == []
    plan = bench.plan()
    assert [(chunk.start, len(chunk.token_ids), chunk.sampling) for chunk in plan.chunks] == [(0, 8, None)]
    out = bench.finish(plan)
    table = plan.chunks[0].block_table
    assert [(push.items, push.zero_tail) for push in of_kind(out, Push)] == [(((0, table[0]), (1, table[1])), None)]

    plan = bench.plan()
    assert plan.chunks[0].position == 10
    out = bench.finish(plan, token_id=9)
    token0, push, commit = out
    assert of_kind([token0], Token0)[0].choices == (FirstToken(0, 9, None),)
    # Only two slots of the last block are used: what another request left in the others stays here.
    assert of_kind([push], Push)[0].items == ((2, table[2]),)
    assert of_kind([push], Push)[0].zero_tail == (table[2], 2)
    capsule = Capsule(10, (StartedChoice(0, 9),), 1, (8, 9), SamplingParams(max_tokens=5))
    assert sent_to([commit], DECODE) == [Commit(key(), capsule)]

    assert bench.sent("r", 0, 1) == []
    assert acknowledge(bench) == []
    assert bench.states() == {"r#1": "acknowledged"}
    assert bench.sent("r", 2) == [FinishPush(ticket_of("r"))]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, None),
        ({"logit_bias": ((3, 1.0),), "min_tokens": 2}, None),
        ({"repetition_penalty": 1.1}, PenaltyCounts((5, 6), ((7, 2), (8, 1)))),
        ({"presence_penalty": 0.1}, PenaltyCounts((), ((7, 2), (8, 1)))),
    ],
)
def test_the_capsule_carries_counts_if_a_penalty_is_on(
    bench: PrefillBench, options: dict[str, Any], counts: PenaltyCounts | None
) -> None:
    """What an earlier attempt generated is output, though it is part of the prompt now. Token 0 is the choice's own."""
    sampling = SamplingParams(max_tokens=9, **options)
    submit = make_submit((5, 6, 5, 7, 7, 8), num_emitted=3)
    bench.message(msgspec.structs.replace(submit, sampling=sampling))
    plan = bench.plan()
    (chunk,) = plan.chunks
    assert chunk.num_generated == 3
    assert (chunk.history is not None) == (counts is not None)
    if chunk.history is not None:
        assert sum(chunk.history.arrays()[1].tolist()) == 3
    (commit,) = of_kind(bench.finish(plan, token_id=9), Commit)
    assert (commit.capsule.num_emitted, commit.capsule.penalty_counts) == (4, counts)
    cancel(bench)


def test_only_the_last_chunk_counts_the_prompt(bench: PrefillBench) -> None:
    sampling = SamplingParams(max_tokens=9, repetition_penalty=2.0)
    bench.message(msgspec.structs.replace(make_submit(10), sampling=sampling))
    plan = bench.plan()
    assert [chunk.history for chunk in plan.chunks] == [None]
    bench.finish(plan)
    plan = bench.plan()
    assert [chunk.history is None for chunk in plan.chunks] == [False]
    bench.finish(plan)
    cancel(bench)


def test_logprobs_of_token_0_go_to_the_router(bench: PrefillBench) -> None:
    bench.submit(4)
    logprobs = TokenLogprobs(-0.5, ((9, -0.5),))
    bench.plan()
    out = bench.finish_with(StepResult((SampledToken(key(), 9, logprobs),), (), 0.1))
    assert of_kind(out, Token0)[0].choices == (FirstToken(0, 9, None, logprobs),)
    cancel(bench)


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 7, 8, 9, 12, 16])
@pytest.mark.parametrize("cached", [False, True])
def test_each_block_is_pushed_exactly_once_at_every_length(bench: PrefillBench, prompt_len: int, cached: bool) -> None:
    num_blocks = -(-prompt_len // BLOCK_SIZE)
    if cached:
        bench.submit(prompt_len, name="warm", max_tokens=1)
        while bench.states():
            bench.step()
    for first_missing in range(0, prompt_len // BLOCK_SIZE * BLOCK_SIZE + 1, BLOCK_SIZE):
        name = f"r{first_missing}"
        bench.submit(prompt_len, name=name, first_missing=first_missing)
        pushed: list[int] = []
        commits: list[Commit] = []
        while not commits:
            out = bench.step()
            pushed += [index for push in of_kind(out, Push) for index, _ in push.items]
            commits = of_kind(out, Commit)
        assert pushed == list(range(num_blocks - first_missing // BLOCK_SIZE))
        assert len(commits[0].capsule.tail_token_ids) == prompt_len % BLOCK_SIZE
        acknowledge(bench, name)
        bench.sent(name, *pushed)
        assert bench.states() == {}


def test_a_cached_prefix_is_not_computed_again_but_the_last_token_always_is(bench: PrefillBench) -> None:
    bench.submit(8, name="a", max_tokens=1)
    bench.step()
    bench.submit(8, name="b")
    plan = bench.plan()
    assert [(chunk.start, chunk.position) for chunk in plan.chunks] == [(4, 8)]
    out = bench.finish(plan)
    assert of_kind(out, Token0)[0].cached_tokens == 4
    table = plan.chunks[0].block_table
    assert of_kind(out, Push)[0].items == ((0, table[0]), (1, table[1]))
    # Its own copy of the second block was written while the first one's copy carries the name.
    assert bench.pool.match(make_submit(8).block_hashes) != list(table)
    acknowledge(bench, "b")
    bench.sent("b", 0, 1)


def test_two_equal_prompts_at_once_write_different_blocks(bench: PrefillBench) -> None:
    bench.submit(4, name="a", max_tokens=1)
    bench.submit(4, name="b", max_tokens=1)
    plan = bench.plan()
    first, second = (set(chunk.block_table) for chunk in plan.chunks)
    assert not first & second
    bench.finish(plan)
    assert bench.pool.num_named == 1


def test_nothing_is_missing_nothing_is_pushed(bench: PrefillBench) -> None:
    bench.submit(8, first_missing=8)
    out = bench.step()
    assert of_kind(out, Push) == []
    assert len(of_kind(out, Commit)) == 1
    assert acknowledge(bench) == []
    assert bench.states() == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 1}, "length"),
        ({"max_tokens": 5, "num_emitted": 4}, "length"),
        ({"max_tokens": 5, "stop": (9,)}, "stop"),
        ({"max_tokens": 1, "stop": (9,)}, "stop"),
    ],
)
def test_a_request_that_ends_at_token0_never_reaches_the_decode_node(
    bench: PrefillBench, options: dict[str, object], reason: str
) -> None:
    bench.submit(8, **options)
    out = bench.step()
    assert [first.finish_reason for first in of_kind(out, Token0)[0].choices] == [reason]
    assert of_kind(out, Commit) == of_kind(out, Push) == []
    assert sent_to(out, DECODE) == [Cancelled(key(), blocks_freed=2, blocks_sent=0)]
    assert bench.states() == {}


def test_a_stop_at_token0_takes_back_what_was_pushed(bench: PrefillBench) -> None:
    bench.submit(10, stop=(9,))
    bench.step()
    out = bench.step()
    assert of_kind(out, CancelPush) == [CancelPush(ticket_of("r"))]
    assert bench.states() == {"r#1": "ended"}
    out = bench.push_ended(blocks_sent=2)
    assert sent_to(out, DECODE) == [Cancelled(key(), blocks_freed=3, blocks_sent=2)]


def test_the_acknowledgement_may_come_before_the_transport_is_done(bench: PrefillBench) -> None:
    bench.submit(8)
    bench.step()
    acknowledge(bench)
    assert bench.pool.num_free == SETTINGS.num_blocks - 2
    assert bench.sent("r", 0) == []
    assert bench.sent("r", 1) == [FinishPush(ticket_of("r"))]


def test_requests_wait_in_order_of_arrival(bench: PrefillBench) -> None:
    bench.submit(20, name="big", max_tokens=1)
    bench.submit(range(30, 46), name="next", max_tokens=1)  # four blocks, three are free
    bench.submit(range(50, 54), name="tiny", max_tokens=1)  # would fit, but none overtakes another
    plan = bench.plan()
    assert [chunk.key for chunk in plan.chunks] == [key("big")]
    load = bench.state.load()
    assert (load.num_running, load.num_waiting, load.waiting_tokens) == (1, 2, 40)
    bench.finish(plan)
    order = []
    while bench.states():
        order += [token.key.request_id for token in of_kind(bench.step(), Token0)]
    assert order[0] == "big"
    assert set(order) == {"big", "next", "tiny"}


def test_a_cached_prefix_that_is_free_leaves_less_room(bench: PrefillBench) -> None:
    bench.submit(16, name="warm", max_tokens=1)
    while bench.states():
        bench.step()
    bench.submit(range(50, 61), name="a", max_tokens=1)  # three of eight blocks
    first = bench.plan()
    # It needs six blocks: three are cached and free, which leaves two of the five free ones for the other three.
    bench.submit((*range(12), *range(70, 80)), name="b", max_tokens=1)
    bench.finish(first)
    second = bench.plan()
    assert [chunk.key for chunk in second.chunks] == [key("a")]
    bench.finish(second)
    while bench.states():
        bench.step()


def test_no_more_prompts_interleave_than_allowed(bench: PrefillBench) -> None:
    for name in "abc":
        bench.submit(7, name=name, max_tokens=1)
    plan = bench.plan()
    assert [chunk.key for chunk in plan.chunks] == [key("a"), key("b")]
    for name in "abc":
        bench.message(Cancel(key(name)))
    bench.finish(plan)


def test_a_ping_is_answered_with_the_load(bench: PrefillBench) -> None:
    assert sent_to(bench.message(Ping(3)), ROUTER) == [Pong(3, bench.state.load())]


def test_foreign_messages_are_ignored(bench: PrefillBench) -> None:
    assert bench.message(Acknowledged(key("nobody")), DECODE) == []
    assert bench.message(Failed(key("nobody"), "timeout", "late")) == []
    assert bench.message(Pong(1, bench.state.load())) == []
    assert bench.push_ended("nobody") == bench.sent("nobody", 0) == []
