"""Several answers to one prompt: one transfer, shared blocks, and every choice ending by itself."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from choices_bench import cancel, drop, finish_each, items_of, row
from decode_bench import (
    BLOCK_SIZE,
    PREFILL,
    SETTINGS,
    DecodeBench,
    key,
    make_commit,
    make_reserve,
    of_kind,
)

from cluster.request import SamplingParams
from cluster.wire import (
    Cancel,
    CancelChoice,
    Commit,
    Failed,
    Granted,
    PenaltyCounts,
    Ping,
    Pong,
    Refused,
    StartedChoice,
    TokenItem,
    Tokens,
)
from engine.instructions import Expect
from engine.step import BlockCopy, SampledToken, StepResult

BOUNDARY_LENGTHS = [1, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize("prompt_len", BOUNDARY_LENGTHS)
@pytest.mark.parametrize("num_choices", [2, 3])
def test_one_prompt_is_sent_once_and_forked(bench: DecodeBench, prompt_len: int, num_choices: int) -> None:
    out = bench.make_runnable(1, prompt_len, max_tokens=3, num_choices=num_choices)
    num_full, partial = prompt_len // BLOCK_SIZE, bool(prompt_len % BLOCK_SIZE)
    (ticket,) = [granted.ticket for granted in of_kind(out, Granted)]
    assert ticket.num_blocks == num_full + partial
    assert len(of_kind(out, Expect)) == 1
    plan = bench.plan()
    assert [chunk.sampling.choice for chunk in plan.chunks if chunk.sampling] == list(range(num_choices))
    assert [list(chunk.token_ids) for chunk in plan.chunks] == [[100 + i] for i in range(num_choices)]
    tables = [list(chunk.block_table) for chunk in plan.chunks]
    assert all(table[:num_full] == tables[0][:num_full] for table in tables)
    own = [table[num_full] for table in tables]
    assert len(set(own)) == num_choices, "two choices would write one block"
    copies = [BlockCopy(own[-1], block_id) for block_id in own[:-1]] if partial else []
    assert list(plan.copies) == copies
    bench.finish(plan)
    assert bench.plan().copies == ()
    bench.finish(plan)
    assert bench.states() == {}


def test_every_owner_of_a_shared_block_is_shown(bench: DecodeBench) -> None:
    bench.make_runnable(1, 10, max_tokens=4, num_choices=3)
    assert {report.owners for report in bench.pool.report()} == {("r#1",)}
    bench.step()
    owners = {report.block_id: report.owners for report in bench.pool.report()}
    assert sorted(owners.values()) == [
        ("r#1/0",),
        ("r#1/0", "r#1/1", "r#1/2"),
        ("r#1/0", "r#1/1", "r#1/2"),
        ("r#1/1",),
        ("r#1/2",),
    ]
    assert (row(bench)["blocks"], row(bench)["choices"]) == (5, 3)
    assert bench.state.check() == ()
    drop(bench, 1)
    assert {owner for report in bench.pool.report() for owner in report.owners} == {"r#1/0", "r#1/2"}
    assert bench.state.check() == ()
    cancel(bench)


def test_choices_end_one_by_one_and_free_what_is_theirs(bench: DecodeBench) -> None:
    """Two full prompt blocks are everybody's until the last has ended."""
    bench.make_runnable(1, 10, max_tokens=4, num_choices=3, stop=(55,))
    plan = bench.plan()
    assert items_of(finish_each(bench, plan, {0: 7, 1: 55, 2: 8})) == [
        (0, 1, (7,), None),
        (1, 1, (55,), "stop"),
        (2, 1, (8,), None),
    ]
    assert (row(bench)["blocks"], row(bench)["choices"], row(bench)["state"]) == (4, 2, "running")
    assert bench.pool.num_free == SETTINGS.num_blocks - 4
    assert items_of(finish_each(bench, bench.plan(), {0: 55, 2: 9})) == [(0, 2, (55,), "stop"), (2, 2, (9,), None)]
    assert row(bench)["blocks"] == 3
    assert items_of(finish_each(bench, bench.plan(), {2: 6})) == [(2, 3, (6,), "length")]
    assert bench.states() == {}
    assert bench.pool.num_free == SETTINGS.num_blocks
    assert bench.state.counters()["intakes_finished_total"] == 1
    assert bench.state.counters()["generated_tokens_total"] == 6


@pytest.mark.parametrize("ended", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}])
@pytest.mark.parametrize("prompt_len", [4, 6])
def test_choices_that_ended_at_token_0_never_run(bench: DecodeBench, ended: set[int], prompt_len: int) -> None:
    """And what was promised to them is free at once."""
    reserve = make_reserve(prompt_len, max_tokens=5, num_choices=3)
    bench.message(reserve)
    before = bench.state.load().free_blocks
    bench.arrived(1, *range(-(-prompt_len // BLOCK_SIZE)))
    bench.message(make_commit(reserve, prompt_len, ended=ended), PREFILL)
    assert bench.state.load().free_blocks > before
    going_on = [choice for choice in range(3) if choice not in ended]
    plan = bench.plan()
    assert [chunk.sampling.choice for chunk in plan.chunks if chunk.sampling] == going_on
    assert len(plan.copies) == (len(going_on) - 1 if prompt_len % BLOCK_SIZE else 0)
    for _ in range(3):
        bench.finish(plan)
        plan = bench.plan()
    assert {finish for *_item, finish in items_of(bench.finish(plan))} == {"length"}
    assert bench.states() == {}


@pytest.mark.parametrize("prompt_len", BOUNDARY_LENGTHS)
@pytest.mark.parametrize("max_tokens", [2, 4, 5, 6])
def test_growth_is_there_for_every_choice(prompt_len: int, max_tokens: int) -> None:
    """In the smallest pool that grants it."""
    for num_blocks in range(1, 20):
        bench = DecodeBench(replace(SETTINGS, num_blocks=num_blocks))
        out = bench.reserve(prompt_len, max_tokens=max_tokens, num_choices=3)
        if of_kind(out, Granted):
            break
    assert bench.state.load().free_blocks == 0, "one block less would have been refused"
    bench.arrived(1, *range(-(-prompt_len // BLOCK_SIZE)))
    bench.commit(prompt_len, max_tokens=max_tokens, num_choices=3)
    num_steps = 0
    while bench.states():
        bench.step()
        num_steps += 1
    assert num_steps == max_tokens - 1
    assert bench.pool.num_free == num_blocks


def test_slots_are_counted_by_choice(bench: DecodeBench) -> None:
    (never,) = of_kind(bench.reserve(4, name="big", max_tokens=1, num_choices=4), Refused)
    assert (never.retry_after_s, never.code) == (None, "invalid_value")
    assert "4 choices" in never.reason
    assert of_kind(bench.reserve(4, name="two", max_tokens=1, num_choices=2), Granted)
    (later,) = of_kind(bench.reserve(4, name="next", max_tokens=1, num_choices=2), Refused)
    assert later.retry_after_s is not None
    assert of_kind(bench.reserve(4, name="one", max_tokens=1), Granted)
    for ticket_id, name in ((1, "two"), (2, "one")):
        bench.message(Cancel(key(name)))
        bench.withdrawn(ticket_id)


def test_choices_cannot_go_on_from_the_tokens_of_one(bench: DecodeBench) -> None:
    (refused,) = of_kind(bench.reserve(4, num_emitted=2, num_choices=2), Refused)
    assert refused.retry_after_s is None


def test_load_counts_choices(bench: DecodeBench) -> None:
    bench.make_runnable(1, 4, max_tokens=3, num_choices=3)
    (pong,) = of_kind(bench.message(Ping(1)), Pong)
    assert (pong.load.num_running, pong.load.num_waiting) == (3, 0)
    cancel(bench)


def test_a_failed_step_fails_all_choices_once(bench: DecodeBench) -> None:
    bench.make_runnable(1, num_choices=3)
    out = bench.finish(bench.plan(), failed=["r"])
    assert [failed.code for failed in of_kind(out, Failed)] == ["engine_error"]
    assert bench.states() == {}
    assert bench.pool.num_named == 0, "a retry would find what made it fail"


def test_a_missing_token_of_one_choice_fails_the_request(bench: DecodeBench) -> None:
    bench.make_runnable(1, num_choices=3)
    bench.plan()
    out = bench.finish_with(StepResult(tuple(SampledToken(key(), 1, choice=i) for i in (0, 2)), (), 0.1))
    assert [failed.code for failed in of_kind(out, Failed)] == ["engine_error"]
    assert items_of(out) == []
    assert bench.states() == {}


@pytest.mark.parametrize("choices", [(), (0, 0), (1, 0), (3,), (0, 1, 2, 3)])
def test_a_commit_of_other_choices_is_never_decoded(bench: DecodeBench, choices: tuple[int, ...]) -> None:
    reserve = make_reserve(4, num_choices=3)
    bench.message(reserve)
    started = tuple(StartedChoice(choice, 5) for choice in choices)
    capsule = msgspec.structs.replace(make_commit(reserve, 4).capsule, choices=started)
    (failed,) = of_kind(bench.message(Commit(key(), capsule), PREFILL), Failed)
    assert "choices" in failed.message
    bench.withdrawn()


def test_every_choice_has_its_own_history(bench: DecodeBench) -> None:
    sampling = SamplingParams(max_tokens=9, repetition_penalty=1.1, num_choices=2)
    reserve = msgspec.structs.replace(make_reserve(4), sampling=sampling)
    capsule = msgspec.structs.replace(make_commit(reserve, 4).capsule, penalty_counts=PenaltyCounts((0, 1, 2, 3), ()))
    bench.message(reserve)
    bench.arrived(1, 0)
    bench.message(Commit(key(), capsule), PREFILL)
    finish_each(bench, bench.plan(), {0: 7, 1: 101})
    plan = bench.plan()
    counts = [chunk.history.counts() for chunk in plan.chunks if chunk.history is not None]
    assert counts == [
        PenaltyCounts((0, 1, 2, 3), ((100, 1), (7, 1))),
        PenaltyCounts((0, 1, 2, 3), ((101, 2),)),
    ]
    cancel(bench)
    bench.finish(plan)


def test_equal_answers_have_one_name_and_their_own_blocks(bench: DecodeBench) -> None:
    """Greedy choices write the same text: the first block of it is findable, none is written by two."""
    reserve = make_reserve(4, max_tokens=6, num_choices=2)
    bench.message(reserve)
    bench.arrived(1, 0)
    same = (StartedChoice(0, 100), StartedChoice(1, 100))
    bench.message(Commit(key(), msgspec.structs.replace(make_commit(reserve, 4).capsule, choices=same)), PREFILL)
    for _ in range(4):
        bench.step(9)
    assert bench.pool.num_named == 2
    assert [item.finish_reason for tokens in of_kind(bench.step(9), Tokens) for item in tokens.items] == ["length"] * 2


def test_a_single_choice_keeps_its_own_number(bench: DecodeBench) -> None:
    sampling = SamplingParams(max_tokens=3, choice=5)
    reserve = msgspec.structs.replace(make_reserve(4), sampling=sampling)
    bench.message(reserve)
    bench.arrived(1, 0)
    capsule = msgspec.structs.replace(make_commit(reserve, 4).capsule, choices=(StartedChoice(5, 9),))
    bench.message(Commit(key(), capsule), PREFILL)
    (tokens,) = of_kind(bench.step(1), Tokens)
    assert tokens.items == (TokenItem(key(), 1, (1,), None, choice=5),)
    bench.message(CancelChoice(key(), 5))
    assert bench.states() == {}
