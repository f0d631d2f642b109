"""A request's way through the decode node: grant, arrival in any order, commit, decode steps, the end."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest
from decode_bench import (
    BLOCK_SIZE,
    DECODE,
    OTHER_ROUTER,
    PREFILL,
    ROUTER,
    DecodeBench,
    key,
    make_commit,
    make_reserve,
    of_kind,
    sent_to,
)

from cluster.prefix_hash import block_hashes
from cluster.request import SamplingParams, TokenLogprobs
from cluster.wire import (
    Acknowledged,
    Cancel,
    Commit,
    Failed,
    FirstToken,
    Granted,
    PenaltyCounts,
    Ping,
    Pong,
    Refused,
    Token0,
    TokenItem,
    Tokens,
)
from engine.instructions import CompleteTransfer, Expect
from engine.step import SampledToken, StepResult
from kvtransfer.ticket import BlockHandle, decode_ticket


def run_to_the_end(bench: DecodeBench) -> list[TokenItem]:
    items: list[TokenItem] = []
    while bench.states():
        items += [item for tokens in of_kind(bench.step(), Tokens) for item in tokens.items]
    return items


def test_one_request_from_reserve_to_freed(bench: DecodeBench) -> None:
    expect, granted = bench.reserve(10, max_tokens=3)
    ticket = of_kind([granted], Granted)[0].ticket
    assert (ticket.decode, ticket.first_missing_token, ticket.num_blocks) == (DECODE, 0, 3)
    handles = decode_ticket(ticket.transfer).handles
    assert expect == Expect(1, handles, PREFILL)
    assert handles == tuple(BlockHandle(i, bench.pool.generation(i)) for i in range(3))

    assert bench.arrived(1, 0, 1) == []
    assert bench.states() == {"r#1": "receiving"}
    assert bench.commit(10, max_tokens=3) == []
    assert bench.pool.num_named == 0  # nothing can be found before everything is here
    assert bench.state.schedule(bench.now) is None
    out = bench.arrived(1, 2)
    assert out[0] == CompleteTransfer(1)
    assert sent_to(out, PREFILL) == [Acknowledged(key())]
    assert bench.pool.num_named == 2

    plan = bench.plan()
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.position, tuple(chunk.token_ids)) == (10, 11, (100,))
    assert sent_to(bench.finish(plan, 101), ROUTER) == [Tokens(1, (TokenItem(key(), 1, (101,), None),))]
    assert sent_to(bench.step(102), ROUTER) == [Tokens(2, (TokenItem(key(), 2, (102,), "length"),))]


@pytest.mark.parametrize("order", list(permutations(["commit", "block 0", "block 1", "block 2"])))
def test_it_runs_when_the_last_piece_is_here_whatever_came_first(bench: DecodeBench, order: tuple[str, ...]) -> None:
    bench.reserve(10, max_tokens=2)
    for number, piece in enumerate(order):
        assert bench.state.schedule(bench.now) is None
        out = bench.commit(10, max_tokens=2) if piece == "commit" else bench.arrived(1, int(piece[-1]))
        assert bool(of_kind(out, Acknowledged)) == (number == 3)
    assert [item.index for item in run_to_the_end(bench)] == [1]


def test_a_prompt_that_is_here_needs_only_the_commit(bench: DecodeBench) -> None:
    bench.make_runnable(1, 8, name="first", max_tokens=2)
    run_to_the_end(bench)
    out = bench.reserve(8, max_tokens=2)
    assert of_kind(out, Expect) == []
    ticket = of_kind(out, Granted)[0].ticket
    assert (ticket.first_missing_token, ticket.num_blocks, ticket.transfer) == (8, 0, b"")
    out = bench.commit(8, max_tokens=2)
    assert of_kind(out, CompleteTransfer) == []
    assert len(of_kind(out, Acknowledged)) == 1
    run_to_the_end(bench)
    assert bench.state.counters()["prompt_blocks_shared_total"] == 2


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("max_tokens", [2, 4, 5, 6, 12])
def test_tokens_have_no_gap_and_the_answer_can_be_found(bench: DecodeBench, prompt_len: int, max_tokens: int) -> None:
    bench.make_runnable(1, prompt_len, max_tokens=max_tokens)
    items = run_to_the_end(bench)
    assert [item.index for item in items] == list(range(1, max_tokens))
    assert [item.finish_reason for item in items] == [None] * (max_tokens - 2) + ["length"]
    assert bench.state.counters()["decode_computed_tokens_total"] == max_tokens - 1
    # Stored: the prompt, token 0 and all but the last generated one; every full block of that has its name.
    stored = [*range(prompt_len), 100, *[101] * (max_tokens - 2)]
    names = block_hashes(make_reserve(1).seed_hash, stored, BLOCK_SIZE)
    assert len(bench.pool.match(names)) == len(names)
    assert bench.pool.num_named == len(names)


def test_a_stop_token_ends_it_and_is_the_last_token(bench: DecodeBench) -> None:
    bench.make_runnable(1, 8, max_tokens=9, stop=(55,))
    bench.step(7)
    (tokens,) = of_kind(bench.step(55), Tokens)
    assert tokens.items == (TokenItem(key(), 2, (55,), "stop"),)


def test_penalties_count_on_from_the_capsule(bench: DecodeBench) -> None:
    sampling = SamplingParams(max_tokens=9, repetition_penalty=1.1)
    reserve = msgspec.structs.replace(make_reserve(4), sampling=sampling)
    capsule = msgspec.structs.replace(make_commit(reserve, 4).capsule, penalty_counts=PenaltyCounts((0, 1, 2, 3), ()))
    bench.message(reserve)
    bench.arrived(1, 0)
    bench.message(Commit(key(), capsule), PREFILL)
    for num_generated, token_id in enumerate((3, 100, 55), start=1):
        plan = bench.plan()
        assert plan.chunks[0].num_generated == num_generated
        bench.finish(plan, token_id)
    plan = bench.plan()
    history = plan.chunks[0].history
    assert history is not None
    assert history.counts() == PenaltyCounts((0, 1, 2), ((3, 1), (100, 2), (55, 1)))
    bench.message(Cancel(key()))
    bench.finish(plan)


@pytest.mark.parametrize(("penalty", "counts"), [(1.0, PenaltyCounts((), ())), (1.5, None)], ids=["unasked", "missing"])
def test_a_capsule_without_the_counts_it_needs_is_refused(
    bench: DecodeBench, penalty: float, counts: PenaltyCounts | None
) -> None:
    reserve = msgspec.structs.replace(
        make_reserve(4), sampling=SamplingParams(max_tokens=9, repetition_penalty=penalty)
    )
    bench.message(reserve)
    capsule = msgspec.structs.replace(make_commit(reserve, 4).capsule, penalty_counts=counts)
    (failed,) = of_kind(bench.message(Commit(key(), capsule), PREFILL), Failed)
    assert "penalties" in failed.message
    bench.withdrawn()


def test_logprobs_go_with_their_token(bench: DecodeBench) -> None:
    bench.make_runnable(1, 4, max_tokens=3)
    bench.plan()
    logprobs = TokenLogprobs(-1.5, ((7, -0.5), (101, -1.5)))
    out = bench.finish_with(StepResult((SampledToken(key(), 101, logprobs),), (), 0.1))
    assert of_kind(out, Tokens)[0].items == (TokenItem(key(), 1, (101,), None, (logprobs,)),)
    bench.message(Cancel(key()))


def test_an_answer_goes_on_where_an_earlier_attempt_stopped(bench: DecodeBench) -> None:
    bench.make_runnable(1, 10, max_tokens=8, num_emitted=5)
    assert [(item.index, item.finish_reason) for item in run_to_the_end(bench)] == [(6, None), (7, "length")]


def test_requests_join_and_leave_between_steps(bench: DecodeBench) -> None:
    bench.make_runnable(1, 4, name="a", max_tokens=3)
    first = bench.plan()
    bench.make_runnable(2, range(50, 54), name="b", max_tokens=3)
    bench.finish(first)
    plan = bench.plan()
    assert [chunk.key for chunk in plan.chunks] == [key("a"), key("b")]
    (tokens,) = of_kind(bench.finish(plan), Tokens)
    assert [(item.key, item.finish_reason) for item in tokens.items] == [(key("a"), "length"), (key("b"), None)]
    plan = bench.plan()
    assert [chunk.key for chunk in plan.chunks] == [key("b")]
    bench.finish(plan)


def test_each_router_gets_one_message_a_step(bench: DecodeBench) -> None:
    mine = make_reserve(4, name="a", max_tokens=2)
    theirs = make_reserve(range(50, 54), name="b", max_tokens=2)
    bench.message(mine, ROUTER)
    bench.message(theirs, OTHER_ROUTER)
    for ticket_id, reserve, prompt in ((1, mine, range(4)), (2, theirs, range(50, 54))):
        bench.arrived(ticket_id, 0)
        bench.message(make_commit(reserve, prompt), PREFILL)
    out = bench.step()
    assert [item.key for tokens in of_kind(sent_to(out, ROUTER), Tokens) for item in tokens.items] == [key("a")]  # type: ignore[arg-type]
    assert [item.key for tokens in of_kind(sent_to(out, OTHER_ROUTER), Tokens) for item in tokens.items] == [key("b")]  # type: ignore[arg-type]


def test_two_equal_prompts_at_once_get_different_blocks(bench: DecodeBench) -> None:
    bench.reserve(4, name="a", max_tokens=2)
    bench.reserve(4, name="b", max_tokens=2)
    bench.arrived(1, 0)
    bench.commit(4, name="a", max_tokens=2)
    (handle,) = of_kind(bench.reserve(4, name="c", max_tokens=1), Granted)
    assert handle.ticket.num_blocks == 0  # a's block can be shared from now on, b's cannot
    bench.arrived(2, 0)
    bench.commit(4, name="b", max_tokens=2)
    assert bench.pool.num_named == 1
    bench.message(Cancel(key("c")))
    run_to_the_end(bench)


def test_a_block_that_is_still_arriving_cannot_be_found(bench: DecodeBench) -> None:
    bench.reserve(8, name="a", max_tokens=1)
    bench.arrived(1, 0, 1)
    assert of_kind(bench.reserve(8, name="b", max_tokens=1), Granted)[0].ticket.num_blocks == 2
    for ticket_id, name in ((1, "a"), (2, "b")):
        bench.message(Cancel(key(name)))
        bench.withdrawn(ticket_id)
    assert bench.pool.num_named == 0


def test_growth_is_always_there_however_full_the_pool(bench: DecodeBench) -> None:
    for ticket_id, name in ((1, "a"), (2, "b")):
        prompt = range(ticket_id * 50, ticket_id * 50 + 4)
        bench.make_runnable(ticket_id, prompt, name=name, max_tokens=13)
    assert bench.state.load().free_blocks == 0
    (refused,) = of_kind(bench.reserve(1, name="c", max_tokens=1), Refused)
    assert refused.retry_after_s is not None
    assert len(run_to_the_end(bench)) == 24


def test_a_second_reserve_or_commit_changes_nothing(bench: DecodeBench) -> None:
    bench.reserve(10)
    assert bench.reserve(10) == []
    bench.commit(10)
    assert bench.commit(10) == []
    bench.arrived(1, 0, 1, 2)
    for _ in range(2):  # runnable, then running
        assert sent_to(bench.commit(10), PREFILL) == [Acknowledged(key())], "the answer to the first may be lost"
        assert bench.message(make_commit(make_reserve(10), 10), OTHER_ROUTER) == []
        bench.step()
    assert bench.states() == {"r#1": "running"}
    assert bench.reserve(10) == []
    run_to_the_end(bench)
    assert bench.commit(10) == []


def test_a_ticket_number_in_use_is_not_given_out_again(bench: DecodeBench) -> None:
    numbers = iter([5, 5, 5, 6])
    bench.state._table._new_ticket_id = lambda: next(numbers)
    assert [of_kind(bench.reserve(4, name=name), Expect)[0].ticket_id for name in "ab"] == [5, 6]
    for ticket_id, name in ((5, "a"), (6, "b")):
        bench.message(Cancel(key(name)))
        bench.withdrawn(ticket_id)


def test_a_ping_is_answered_with_what_is_not_promised(bench: DecodeBench) -> None:
    bench.reserve(10, max_tokens=7)
    (pong,) = of_kind(bench.message(Ping(3)), Pong)
    assert (pong.sequence, pong.load.free_blocks, pong.load.num_waiting) == (3, 4, 1)
    bench.message(Cancel(key()))
    bench.withdrawn()


def test_foreign_messages_are_ignored(bench: DecodeBench) -> None:
    assert bench.message(Acknowledged(key())) == []
    assert bench.message(Token0(key(), (FirstToken(0, 1, None),), 0, 0.0, 0.0), PREFILL) == []
    assert bench.message(Commit(key("nobody"), make_commit(make_reserve(4), 4).capsule), PREFILL) == []
    assert bench.arrived(77, 0) == bench.withdrawn(77) == []
