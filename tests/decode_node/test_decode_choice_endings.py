"""Several answers to one prompt, ended one by one or all together, in every window."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from choices_bench import cancel, drop, finish_each, items_of, row
from decode_bench import (
    PREFILL,
    ROUTER,
    SETTINGS,
    DecodeBench,
    key,
    make_commit,
    make_reserve,
    of_kind,
    sent_to,
)

from cluster.wire import (
    Cancel,
    Cancelled,
    Failed,
    Tokens,
)
from decode_node.branch import BRANCH, BranchState
from engine.instructions import Instruction, Withdraw


def reserved(bench: DecodeBench) -> None:
    bench.reserve(10, num_choices=3)


def receiving(bench: DecodeBench) -> None:
    reserved(bench)
    bench.arrived(1, 1)


def committed(bench: DecodeBench) -> None:
    receiving(bench)
    bench.commit(10, num_choices=3)


def runnable(bench: DecodeBench) -> None:
    bench.make_runnable(1, num_choices=3)


def in_first_step(bench: DecodeBench) -> None:
    runnable(bench)
    bench.running = bench.plan()


def running(bench: DecodeBench) -> None:
    runnable(bench)
    bench.step()


def in_later_step(bench: DecodeBench) -> None:
    running(bench)
    bench.running = bench.plan()


Setup = Callable[[DecodeBench], None]
ARRIVING_SETUPS: list[Setup] = [reserved, receiving, committed]
DECODING_SETUPS: list[Setup] = [runnable, in_first_step, running, in_later_step]


def go_on(bench: DecodeBench, setup: Setup) -> list[Instruction]:
    """From wherever ``setup`` left it to the end."""
    out: list[Instruction] = []
    if setup in ARRIVING_SETUPS:
        out += bench.arrived(1, *(i for i in range(3) if setup is reserved or i != 1))
        out += bench.commit(10, num_choices=3)
    if bench.running is not None:
        out += bench.finish(bench.running)
    while bench.states():
        out += bench.step()
    return out


@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("setup", [*ARRIVING_SETUPS, *DECODING_SETUPS])
def test_a_choice_ended_by_the_router_leaves_the_others_alone(bench: DecodeBench, setup: Setup, choice: int) -> None:
    setup(bench)
    assert drop(bench, choice) == []
    assert row(bench)["choices"] == 2
    assert drop(bench, choice) == drop(bench, 7) == []  # a second time, or for nothing: nothing
    others = [each for each in range(3) if each != choice]
    items = items_of(go_on(bench, setup))
    assert {each for each, *_rest in items if each == choice} == set()
    assert [each for each, *_rest, finish in items if finish == "length"] == others
    assert bench.pool.num_free == SETTINGS.num_blocks


@pytest.mark.parametrize("setup", [*ARRIVING_SETUPS, *DECODING_SETUPS])
def test_the_last_choice_ended_by_the_router_ends_the_request(bench: DecodeBench, setup: Setup) -> None:
    setup(bench)
    for choice in (2, 0):
        assert drop(bench, choice) == []
    out = drop(bench, 1)
    if setup in ARRIVING_SETUPS:
        assert of_kind(out, Withdraw) == [Withdraw(1, None)]
        assert sent_to(out, PREFILL) == [Cancel(key())]
        bench.withdrawn()
    if bench.running is not None:
        assert bench.states() != {}, "a step still writes these blocks"
        assert items_of(bench.finish(bench.running)) == []
    assert bench.states() == {}
    assert bench.pool.num_free == SETTINGS.num_blocks
    counters = bench.state.counters()
    ended = "intakes_cancelled_total" if setup in [*ARRIVING_SETUPS, runnable] else "intakes_finished_total"
    assert counters[ended] == 1


def test_the_router_and_the_prefill_node_end_all_choices_between_them(bench: DecodeBench) -> None:
    reserve = make_reserve(10, num_choices=3)
    bench.message(reserve)
    drop(bench, 1)
    out = bench.message(make_commit(reserve, 10, ended={0, 2}), PREFILL)
    assert of_kind(out, Failed) == []
    assert sent_to(out, PREFILL) == [Cancel(key())]
    bench.withdrawn()
    assert bench.states() == {}


@pytest.mark.parametrize("setup", [*ARRIVING_SETUPS, *DECODING_SETUPS])
@pytest.mark.parametrize("dropped", [False, True])
def test_cancel_frees_all_choices_in_every_window(bench: DecodeBench, setup: Setup, dropped: bool) -> None:
    setup(bench)
    if dropped:
        drop(bench, 0)
    out = cancel(bench)
    if setup in ARRIVING_SETUPS:
        assert of_kind(out, Cancelled) == []
        out += bench.withdrawn()
    if bench.running is not None:
        assert of_kind(out, Cancelled) == []
        out += bench.finish(bench.running)
        assert of_kind(out, Tokens) == []
    freed = {reserved: 3, receiving: 3, committed: 3, runnable: 3}.get(setup, 5)
    assert sent_to(out, ROUTER) == [Cancelled(key(), blocks_freed=freed, blocks_sent=0)]
    assert bench.states() == {}
    assert bench.pool.num_free == SETTINGS.num_blocks
    assert bench.state.load().free_blocks == SETTINGS.num_blocks


def test_an_end_by_token_and_by_the_router_in_one_step(bench: DecodeBench) -> None:
    bench.make_runnable(1, 10, max_tokens=5, num_choices=3, stop=(55,))
    plan = bench.plan()
    drop(bench, 0)
    out = finish_each(bench, plan, {0: 1, 1: 55, 2: 2})
    assert items_of(out) == [(1, 1, (55,), "stop"), (2, 1, (2,), None)]
    drop(bench, 2)
    assert bench.states() == {}


def test_every_state_of_a_branch_leads_to_its_end() -> None:
    assert BRANCH.arrows[BranchState.GENERATING] == (BranchState.COMPLETE, BranchState.DROPPED)
    for state in (BranchState.COMPLETE, BranchState.DROPPED):
        assert BRANCH.arrows[state] == (BranchState.GONE,)
    assert [state for state in BranchState if BRANCH.is_final(state)] == [BranchState.GONE]
