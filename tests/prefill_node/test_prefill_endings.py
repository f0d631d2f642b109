"""Every way out: cancels, failures, deadlines, dead peers, silent routers, in every state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prefill_bench import (
    DECODE,
    OTHER_DECODE,
    ROUTER,
    SETTINGS,
    PrefillBench,
    key,
    make_submit,
    of_kind,
    sent_to,
    ticket_of,
)

from cluster.wire import Acknowledged, Cancel, Cancelled, Commit, Failed, Party, PeerDown, Ping, Token0
from engine.instructions import CancelPush, DropPeer, Instruction, Push
from engine.step import StepResult
from kvtransfer.events import PushFailed
from prefill_node.handoff import ACTIVE, HANDOFF, LEAVING, HandoffState

Setup = Callable[[PrefillBench], None]


def queued(bench: PrefillBench) -> None:
    bench.submit(10)


def prefilling(bench: PrefillBench) -> None:
    """One chunk computed, two blocks handed to the transport."""
    bench.submit(10)
    bench.step()


def in_first_step(bench: PrefillBench) -> None:
    bench.submit(10)
    bench.running = bench.plan()


def in_last_step(bench: PrefillBench) -> None:
    prefilling(bench)
    bench.running = bench.plan()


def sending(bench: PrefillBench) -> None:
    prefilling(bench)
    bench.step()


def acknowledged(bench: PrefillBench) -> None:
    """The decode node has everything, the transport still reads."""
    sending(bench)
    bench.message(Acknowledged(key()), DECODE)


def ended(bench: PrefillBench) -> None:
    bench.submit(10, stop=(9,))
    bench.step()
    bench.step()


SETUPS: dict[Setup, bool] = {  # whether a push is open
    queued: False,
    in_first_step: False,
    prefilling: True,
    in_last_step: True,
    sending: True,
    acknowledged: True,
    ended: True,
}


def cancel(bench: PrefillBench) -> list[Instruction]:
    return bench.message(Cancel(key()))


def decode_cancels(bench: PrefillBench) -> list[Instruction]:
    return bench.message(Cancel(key()), DECODE)


def decode_dies(bench: PrefillBench) -> list[Instruction]:
    return bench.message(PeerDown(DECODE.id, DECODE.epoch))


def deadline_passes(bench: PrefillBench) -> list[Instruction]:
    out: list[Instruction] = []
    for _ in range(13):
        bench.message(Ping(0))
        out += bench.tick(5.0)
    return out


def router_falls_silent(bench: PrefillBench) -> list[Instruction]:
    return bench.tick(10.5)


def push_fails(bench: PrefillBench) -> list[Instruction]:
    return bench.transfer(PushFailed(ticket_of("r"), "reset"))


@pytest.mark.parametrize("end", [cancel, decode_cancels, decode_dies, deadline_passes, router_falls_silent])
@pytest.mark.parametrize("setup", SETUPS)
def test_every_state_has_a_way_out(
    bench: PrefillBench, setup: Setup, end: Callable[[PrefillBench], list[Instruction]]
) -> None:
    """Whatever ends it, in whatever state: once no step writes and no transport reads, nothing is left (fixture)."""
    setup(bench)
    out = end(bench)
    if bench.running is not None:
        assert of_kind(out, Cancelled) == []  # the step still writes the blocks
        out = bench.finish(bench.running)
        assert of_kind(out, Token0) == of_kind(out, Commit) == of_kind(out, Push) == []
    if SETUPS[setup]:
        assert bench.states()
        assert bench.pool.num_free < SETTINGS.num_blocks
        if setup is acknowledged and end in (cancel, decode_cancels, decode_dies):
            bench.sent("r", 0, 1, 2)  # what D has acknowledged goes out by itself
        else:
            bench.push_ended(blocks_sent=2)
    assert bench.states() == {}
    # Late news of it hurt nobody.
    assert bench.push_ended() == bench.sent("r", 0) == push_fails(bench) == []
    assert bench.message(Acknowledged(key()), DECODE) == []


def test_every_state_of_the_table_is_reached_and_left() -> None:
    assert set(HANDOFF.arrows) == set(HandoffState)
    for state, targets in HANDOFF.arrows.items():
        if state in ACTIVE:
            assert {HandoffState.CANCELLED, HandoffState.FAILED} <= set(targets)
        elif state in LEAVING:
            assert targets == (HandoffState.RELEASED,)
    reached = {target for targets in HANDOFF.arrows.values() for target in targets} | {HANDOFF.initial}
    assert reached == set(HandoffState)
    assert [state for state in HandoffState if HANDOFF.is_final(state)] == [HandoffState.RELEASED]


@pytest.mark.parametrize("setup", [queued, prefilling])
@pytest.mark.parametrize(
    ("end", "code"),
    [(decode_dies, "worker_lost"), (deadline_passes, "timeout"), (router_falls_silent, "node_state")],
)
def test_before_commit_the_prefill_node_tells_the_router(
    bench: PrefillBench, setup: Setup, end: Callable[[PrefillBench], list[Instruction]], code: str
) -> None:
    setup(bench)
    out = end(bench)
    assert [failed.code for failed in of_kind(out, Failed)] == [code]
    bench.push_ended()


@pytest.mark.parametrize("end", [deadline_passes, router_falls_silent, push_fails])
def test_after_commit_the_decode_node_speaks_for_the_request(
    bench: PrefillBench, end: Callable[[PrefillBench], list[Instruction]]
) -> None:
    """D may have every block and be streaming: a Failed from here would kill a healthy answer."""
    sending(bench)
    assert of_kind(end(bench), Failed) == []
    assert sent_to(bench.push_ended(blocks_sent=3), DECODE) == [Cancelled(key(), blocks_freed=3, blocks_sent=3)]


def test_a_lost_decode_node_cannot_speak(bench: PrefillBench) -> None:
    sending(bench)
    out = decode_dies(bench)
    assert out[0] == DropPeer(DECODE.id, DECODE.epoch)
    assert [failed.code for failed in of_kind(out, Failed)] == ["worker_lost"]
    bench.push_ended()


def test_another_life_of_the_decode_node_is_another_node(bench: PrefillBench) -> None:
    sending(bench)
    assert bench.message(PeerDown(DECODE.id, DECODE.epoch + 1)) == [DropPeer(DECODE.id, DECODE.epoch + 1)]
    assert bench.message(PeerDown(OTHER_DECODE.id, OTHER_DECODE.epoch)) == [
        DropPeer(OTHER_DECODE.id, OTHER_DECODE.epoch)
    ]
    assert bench.states() == {"r#1": "sending"}
    assert bench.message(Acknowledged(key()), DECODE) == []
    bench.sent("r", 0, 1, 2)


def test_an_acknowledged_request_is_never_failed(bench: PrefillBench) -> None:
    acknowledged(bench)
    assert deadline_passes(bench) == [CancelPush(ticket_of("r"))]
    assert bench.tick(1.0) == []  # not again on every tick
    assert bench.push_ended(blocks_sent=3) == []


@pytest.mark.parametrize("setup", [prefilling, sending])
def test_a_failed_push_may_have_been_opened_anew(bench: PrefillBench, setup: Setup) -> None:
    """PushFailed may be read after the next chunk was handed over; the transport reads that one until PushEnded."""
    setup(bench)
    out = push_fails(bench)
    assert of_kind(out, CancelPush) == [CancelPush(ticket_of("r"))]
    assert bench.states() == {"r#1": "failed"}
    assert bench.pool.num_free == SETTINGS.num_blocks - 3
    assert push_fails(bench) == []
    bench.push_ended(blocks_sent=2)


def test_a_push_that_fails_during_the_step_waits_for_the_step(bench: PrefillBench) -> None:
    prefilling(bench)
    plan = bench.plan()
    assert [failed.code for failed in of_kind(push_fails(bench), Failed)] == ["transfer_failed"]
    assert bench.push_ended(blocks_sent=1) == []
    out = bench.finish(plan)
    assert sent_to(out, DECODE) == [Cancelled(key(), blocks_freed=3, blocks_sent=1)]


@pytest.mark.parametrize("setup", [ended, acknowledged])
def test_a_push_that_fails_while_leaving_is_no_failure(bench: PrefillBench, setup: Setup) -> None:
    setup(bench)
    assert of_kind(push_fails(bench), Failed) == []
    assert of_kind(bench.push_ended(blocks_sent=2), Failed) == []


def test_a_submit_after_its_cancel_never_starts(bench: PrefillBench) -> None:
    assert sent_to(cancel(bench), ROUTER) == [Cancelled(key(), blocks_freed=0, blocks_sent=0)]
    out = bench.submit(10)
    assert [failed.code for failed in of_kind(out, Failed)] == ["node_state"]
    assert sent_to(out, DECODE) == [Cancelled(key(), blocks_freed=0, blocks_sent=0)]
    assert bench.state.schedule(bench.now) is None


def test_everybody_who_asks_is_answered_once(bench: PrefillBench) -> None:
    prefilling(bench)
    other = Party("R2", 1, "tcp://127.0.0.1:9")
    for asker in (ROUTER, DECODE, ROUTER, other):
        assert of_kind(bench.message(Cancel(key()), asker), Cancelled) == []
    out = bench.push_ended(blocks_sent=2)
    assert [each.peer for each in out] == [ROUTER, DECODE, other]  # type: ignore[union-attr]
    assert set(of_kind(out, Cancelled)) == {Cancelled(key(), blocks_freed=3, blocks_sent=2)}
    assert sent_to(cancel(bench), ROUTER) == [Cancelled(key(), blocks_freed=0, blocks_sent=0)]


def test_a_failed_step_fails_its_request_only_and_leaves_no_poisoned_prefix(bench: PrefillBench) -> None:
    bench.submit(12, name="bad")
    bench.step()
    assert bench.pool.num_named == 2
    bench.submit(range(20, 23), name="good", max_tokens=1)
    out = bench.finish(bench.plan(), failed=["bad"])
    assert [(failed.key, failed.code) for failed in of_kind(out, Failed)] == [(key("bad"), "engine_error")]
    assert [token.key for token in of_kind(out, Token0)] == [key("good")]
    assert bench.pool.match(make_submit(12).block_hashes) == []
    bench.push_ended("bad", 2)


def test_a_missing_token_is_an_engine_failure_not_a_hang(bench: PrefillBench) -> None:
    bench.submit(4, max_tokens=1)
    bench.plan()
    out = bench.finish_with(StepResult((), (), 0.1))
    assert [failed.code for failed in of_kind(out, Failed)] == ["engine_error"]


def test_a_failure_elsewhere_ends_it_quietly(bench: PrefillBench) -> None:
    queued(bench)
    out = bench.message(Failed(key(), "timeout", "the other side failed"), DECODE)
    assert of_kind(out, Failed) == []
    assert len(of_kind(out, Cancelled)) == 1


def test_only_the_silent_routers_requests_end(bench: PrefillBench) -> None:
    other = Party("R2", 1, "tcp://127.0.0.1:9")
    bench.submit(4, name="a")
    bench.message(make_submit(4, name="b"), other)
    bench.tick(6.0)
    bench.message(Ping(0), other)
    out = bench.tick(6.0)
    assert [failed.key for failed in of_kind(out, Failed)] == [key("a")]
    bench.message(Cancel(key("b")), other)


def test_counters_tell_the_endings_apart(bench: PrefillBench) -> None:
    bench.submit(4, name="a", max_tokens=1)
    bench.step()
    bench.submit(4, name="b")
    bench.message(Cancel(key("b")))
    bench.submit(4, name="c", deadline_s=1.0)
    bench.tick(2.0)
    counters = bench.state.counters()
    assert counters["handoffs_ended_total"] == 1
    assert counters["handoffs_cancelled_total"] == 1
    assert counters["handoffs_failed_total"] == 1
    assert counters["handoffs_acknowledged_total"] == 0
