"""Every way out: cancels, failures, deadlines, dead peers, silent routers, in every state."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from decode_bench import (
    OTHER_PREFILL,
    OTHER_ROUTER,
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
    Acknowledged,
    Cancel,
    Cancelled,
    Capsule,
    Failed,
    Granted,
    Party,
    PeerDown,
    Ping,
    Refused,
    Tokens,
)
from decode_node.intake import ARRIVING, DECODING, INTAKE, IntakeState
from engine.instructions import CompleteTransfer, DropPeer, Instruction, Withdraw
from engine.step import StepResult
from kvtransfer.events import ReceiveFailed

Setup = Callable[[DecodeBench], None]
End = Callable[[DecodeBench], list[Instruction]]


def reserved(bench: DecodeBench) -> None:
    bench.reserve(10)


def receiving(bench: DecodeBench) -> None:
    reserved(bench)
    bench.arrived(1, 1)


def committed(bench: DecodeBench) -> None:
    receiving(bench)
    bench.commit(10)


def nothing_missing(bench: DecodeBench) -> None:
    """Reserved, with the whole prompt found here."""
    bench.make_runnable(1, 8, name="warm", max_tokens=2)
    bench.step()
    bench.reserve(8)


def runnable(bench: DecodeBench) -> None:
    bench.make_runnable(1)


def running(bench: DecodeBench) -> None:
    runnable(bench)
    bench.step()


def in_step(bench: DecodeBench) -> None:
    runnable(bench)
    bench.running = bench.plan()


def cancel(bench: DecodeBench) -> list[Instruction]:
    return bench.message(Cancel(key()))


def prefill_gives_up(bench: DecodeBench) -> list[Instruction]:
    return bench.message(Cancelled(key(), blocks_freed=3, blocks_sent=2), PREFILL)


def prefill_dies(bench: DecodeBench) -> list[Instruction]:
    return bench.message(PeerDown(PREFILL.id, PREFILL.epoch))


def deadline_passes(bench: DecodeBench) -> list[Instruction]:
    out: list[Instruction] = []
    for _ in range(13):
        bench.message(Ping(0))
        out += bench.tick(5.0)
    return out


def router_falls_silent(bench: DecodeBench) -> list[Instruction]:
    return bench.tick(10.5)


ARRIVING_SETUPS: dict[Setup, bool] = {reserved: True, receiving: True, committed: True, nothing_missing: False}
DECODING_SETUPS: list[Setup] = [runnable, running, in_step]


@pytest.mark.parametrize("end", [cancel, prefill_gives_up, prefill_dies, deadline_passes, router_falls_silent])
@pytest.mark.parametrize("setup", ARRIVING_SETUPS)
def test_while_blocks_arrive_everything_ends_in_quarantine(bench: DecodeBench, setup: Setup, end: End) -> None:
    setup(bench)
    out = end(bench)
    if ARRIVING_SETUPS[setup]:
        blocks_sent = 2 if end is prefill_gives_up else None
        assert of_kind(out, Withdraw) == [Withdraw(1, blocks_sent)]
        assert bench.pool.num_quarantined == 3
        assert bench.arrived(1, 0) == []  # late: dropped, and never named
        assert bench.commit(10) == []
        assert cancel(bench) == []
        out += bench.withdrawn()
    assert bench.states() == {}
    assert bench.pool.num_quarantined == 0
    asked = sent_to(out, PREFILL) == [Cancel(key())]
    assert asked == (end is not prefill_gives_up)
    assert bench.withdrawn() == bench.arrived(1, 2) == prefill_gives_up(bench) == []


@pytest.mark.parametrize("end", [cancel, router_falls_silent])
@pytest.mark.parametrize("setup", DECODING_SETUPS)
def test_a_decoding_request_ends_when_no_step_writes_it(bench: DecodeBench, setup: Setup, end: End) -> None:
    setup(bench)
    out = end(bench)
    if bench.running is not None:
        assert of_kind(out, Cancelled) == []
        assert bench.pool.num_free < SETTINGS.num_blocks
        out += bench.finish(bench.running)
        assert of_kind(out, Tokens) == []
    assert bench.states() == {}
    assert of_kind(out, Withdraw) == []
    assert bool(of_kind(out, Cancelled)) == (end is cancel)


@pytest.mark.parametrize("end", [prefill_gives_up, prefill_dies, deadline_passes])
@pytest.mark.parametrize("setup", DECODING_SETUPS)
def test_nothing_stops_a_decoding_request_for_the_prefill_nodes_sake(
    bench: DecodeBench, setup: Setup, end: End
) -> None:
    setup(bench)
    assert [each for each in end(bench) if not isinstance(each, DropPeer)] == []
    if bench.running is not None:
        bench.finish(bench.running)
    assert bench.states() == {"r#1": "running" if setup is not runnable else "runnable"}
    cancel(bench)


def test_every_state_of_the_table_is_reached_and_left() -> None:
    assert set(INTAKE.arrows) == set(IntakeState)
    for state, targets in INTAKE.arrows.items():
        if state in ARRIVING or state in DECODING:
            assert {IntakeState.CANCELLED, IntakeState.FAILED} <= set(targets)
        elif state is not IntakeState.FREED:
            assert targets == (IntakeState.FREED,)
    reached = {target for targets in INTAKE.arrows.values() for target in targets} | {INTAKE.initial}
    assert reached == set(IntakeState)
    assert [state for state in IntakeState if INTAKE.is_final(state)] == [IntakeState.FREED]


@pytest.mark.parametrize("setup", ARRIVING_SETUPS)
@pytest.mark.parametrize(
    ("end", "code"),
    [(prefill_dies, "worker_lost"), (deadline_passes, "timeout"), (router_falls_silent, "node_state")],
)
def test_the_router_hears_why(bench: DecodeBench, setup: Setup, end: End, code: str) -> None:
    setup(bench)
    assert [failed.code for failed in of_kind(end(bench), Failed)] == [code]
    bench.withdrawn()


@pytest.mark.parametrize(("setup", "codes"), [(reserved, []), (receiving, []), (committed, ["transfer_failed"])])
def test_who_speaks_when_the_prefill_node_gives_up(bench: DecodeBench, setup: Setup, codes: list[str]) -> None:
    """Before its Commit P has told the router; after it P cannot know and leaves the word to D."""
    setup(bench)
    assert [failed.code for failed in of_kind(prefill_gives_up(bench), Failed)] == codes
    bench.withdrawn()


def test_the_sender_may_say_later_how_much_it_sent(bench: DecodeBench) -> None:
    receiving(bench)
    assert of_kind(cancel(bench), Withdraw) == [Withdraw(1, None)]
    assert prefill_gives_up(bench) == [Withdraw(1, 2)]
    out = bench.withdrawn()
    assert sent_to(out, ROUTER) == [Cancelled(key(), blocks_freed=3, blocks_sent=0)]


def test_another_life_of_the_prefill_node_is_another_node(bench: DecodeBench) -> None:
    receiving(bench)
    other = PeerDown(PREFILL.id, PREFILL.epoch + 1)
    assert bench.message(other) == [DropPeer(PREFILL.id, PREFILL.epoch + 1)]
    assert bench.states() == {"r#1": "receiving"}
    cancel(bench)
    bench.withdrawn()


@pytest.mark.parametrize("setup", [reserved, receiving, committed])
def test_a_block_that_broke_off_fails_the_request(bench: DecodeBench, setup: Setup) -> None:
    setup(bench)
    out = bench.transfer(ReceiveFailed(1, "reset"))
    assert [failed.code for failed in of_kind(out, Failed)] == ["transfer_failed"]
    assert bench.transfer(ReceiveFailed(1, "reset")) == []
    bench.withdrawn()


@pytest.mark.parametrize("indexes", [(1,), (3,), (-1,), (0, 3)])
def test_a_block_twice_or_out_of_range_fails_the_request(bench: DecodeBench, indexes: tuple[int, ...]) -> None:
    receiving(bench)
    out = bench.arrived(1, *indexes)
    assert [failed.code for failed in of_kind(out, Failed)] == ["transfer_failed"]
    bench.withdrawn()


def test_a_plane_that_gives_up_a_ticket_unasked_fails_the_request(bench: DecodeBench) -> None:
    receiving(bench)
    out = bench.withdrawn()
    assert [failed.code for failed in of_kind(out, Failed)] == ["transfer_failed"]
    assert bench.states() == {}


GOOD = make_commit(make_reserve(10), 10)


def with_capsule(**changes: object) -> Capsule:
    return msgspec.structs.replace(GOOD.capsule, **changes)


@pytest.mark.parametrize(
    ("capsule", "sender"),
    [
        (GOOD.capsule, OTHER_PREFILL),
        (GOOD.capsule, msgspec.structs.replace(PREFILL, epoch=99)),
        (with_capsule(prompt_len=9), PREFILL),
        (with_capsule(tail_token_ids=(8,)), PREFILL),
        (with_capsule(tail_token_ids=(8, 9, 10)), PREFILL),
        (with_capsule(num_emitted=0), PREFILL),  # more tokens than growth was promised for
        (with_capsule(num_emitted=2), PREFILL),
        (with_capsule(sampling=make_reserve(10, max_tokens=50).sampling), PREFILL),
    ],
)
def test_a_commit_that_does_not_fit_is_never_decoded(bench: DecodeBench, capsule: Capsule, sender: Party) -> None:
    reserved(bench)
    out = bench.message(msgspec.structs.replace(GOOD, capsule=capsule), sender)
    assert [failed.code for failed in of_kind(out, Failed)] == ["transfer_failed"]
    bench.withdrawn()


def test_a_commit_for_a_request_that_has_ended_is_never_decoded(bench: DecodeBench) -> None:
    bench.reserve(10, max_tokens=1)
    out = bench.commit(10, max_tokens=1)
    assert [failed.code for failed in of_kind(out, Failed)] == ["transfer_failed"]
    bench.withdrawn()


def test_a_reserve_after_its_cancel_is_refused(bench: DecodeBench) -> None:
    assert sent_to(cancel(bench), ROUTER) == [Cancelled(key(), blocks_freed=0, blocks_sent=0)]
    (refused,) = of_kind(bench.reserve(10), Refused)
    assert refused.retry_after_s is None


def test_everybody_who_asks_is_answered_once(bench: DecodeBench) -> None:
    in_step(bench)
    for asker in (ROUTER, OTHER_ROUTER, ROUTER):
        assert bench.message(Cancel(key()), asker) == []
    assert bench.running is not None
    out = bench.finish(bench.running)
    assert [each.peer for each in out] == [ROUTER, OTHER_ROUTER]  # type: ignore[union-attr]
    assert set(of_kind(out, Cancelled)) == {Cancelled(key(), blocks_freed=3, blocks_sent=0)}


def test_a_failed_step_fails_its_request_only_and_leaves_no_poisoned_prefix(bench: DecodeBench) -> None:
    bench.make_runnable(1, 8, name="bad", max_tokens=3)
    bench.make_runnable(2, range(50, 54), name="good", max_tokens=2)
    assert bench.pool.num_named == 3
    out = bench.finish(bench.plan(), failed=["bad"])
    assert [(failed.key, failed.code) for failed in of_kind(out, Failed)] == [(key("bad"), "engine_error")]
    assert [item.key for tokens in of_kind(out, Tokens) for item in tokens.items] == [key("good")]
    assert bench.pool.match(make_reserve(8).block_hashes) == []


def test_a_reader_does_not_name_again_what_was_found_bad(bench: DecodeBench) -> None:
    bench.make_runnable(1, 8, name="bad", max_tokens=3)
    plan = bench.plan()
    bench.reserve(8, name="reader", max_tokens=2)
    bench.finish(plan, failed=["bad"])
    bench.commit(8, name="reader", max_tokens=2)
    assert bench.pool.num_named == 0
    bench.step()


def test_a_missing_token_is_an_engine_failure_not_a_crash(bench: DecodeBench) -> None:
    in_step(bench)
    out = bench.finish_with(StepResult((), (), 0.1))
    assert [failed.code for failed in of_kind(out, Failed)] == ["engine_error"]


def test_only_the_silent_routers_requests_end(bench: DecodeBench) -> None:
    bench.reserve(4, name="a")
    bench.message(make_reserve(4, name="b"), OTHER_ROUTER)
    bench.tick(6.0)
    bench.message(Ping(0), OTHER_ROUTER)
    out = bench.tick(6.0)
    assert [failed.key for failed in of_kind(out, Failed)] == [key("a")]
    bench.message(Cancel(key("b")), OTHER_ROUTER)
    bench.withdrawn(1)
    bench.withdrawn(2)


def test_quarantined_blocks_are_nobodys_room(bench: DecodeBench) -> None:
    bench.reserve(32, max_tokens=1)
    cancel(bench)
    (refused,) = of_kind(bench.reserve(4, name="next"), Refused)
    assert refused.retry_after_s is not None
    bench.withdrawn()
    assert of_kind(bench.reserve(4, name="next"), Granted)
    assert of_kind(bench.message(Cancel(key("next"))), CompleteTransfer) == []
    assert of_kind(bench.withdrawn(2), Acknowledged) == []
