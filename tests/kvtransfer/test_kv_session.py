"""The life of a transfer: any order of what can happen ends it, once, in one of three ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.transitions import IllegalTransitionError
from kvtransfer.session import (
    DRAIN_S,
    OUTCOMES,
    RECEIVE,
    SEND,
    ReceiveSession,
    ReceiveState,
    SendSession,
    SendState,
)


def send(*verbs: str) -> SendSession:
    session = SendSession(0.0)
    for verb in verbs:
        getattr(session, verb)(1.0)
    return session


def receive(*verbs: str) -> ReceiveSession:
    session = ReceiveSession(0.0)
    for verb in verbs:
        getattr(session, verb)(1.0)
    return session


@pytest.mark.parametrize(
    ("verbs", "draining", "end"),
    [
        (["finish"], False, SendState.DONE),
        (["finish", "finish"], False, SendState.DONE),
        (["cancel"], True, SendState.CANCELLED),
        (["finish", "cancel"], True, SendState.CANCELLED),
        (["fail"], True, SendState.FAILED),
        (["finish", "fail"], True, SendState.FAILED),
        (["fail", "finish"], True, SendState.FAILED),
        (["fail", "cancel"], True, SendState.CANCELLED),
        (["cancel", "fail", "cancel", "finish"], True, SendState.CANCELLED),
    ],
)
def test_how_a_push_ends(verbs: list[str], draining: bool, end: SendState) -> None:
    session = send(*verbs)
    assert not session.takes_blocks
    assert session.is_draining == draining
    assert not session.settle(num_waiting=0, num_posted=1, now=2.0)
    if not draining:
        assert not session.settle(num_waiting=1, num_posted=0, now=2.0)
    assert session.settle(num_waiting=0, num_posted=0, now=2.0)
    assert (session.state, session.is_over) == (end, True)


def test_an_open_push_does_not_end_by_itself() -> None:
    session = send()
    assert session.takes_blocks
    assert not session.settle(0, 0, 1.0)
    assert session.takes_blocks


@pytest.mark.parametrize(
    ("verbs", "end"),
    [
        (["withdraw"], ReceiveState.CANCELLED),
        (["claimed", "withdraw", "withdraw"], ReceiveState.CANCELLED),
        (["claimed", "withdraw", "broke_off"], ReceiveState.CANCELLED),
        (["claimed", "broke_off", "withdraw"], ReceiveState.FAILED),
        (["claimed", "broke_off", "claimed", "broke_off", "withdraw", "withdraw"], ReceiveState.FAILED),
    ],
)
def test_how_a_ticket_ends_early(verbs: list[str], end: ReceiveState) -> None:
    session = receive(*verbs)
    assert not session.settle(num_landing=1, now=2.0)
    assert session.settle(num_landing=0, now=2.0)
    assert (session.state, session.is_over) == (end, True)


@pytest.mark.parametrize("verbs", [["claimed"], ["claimed", "broke_off"], ["claimed", "broke_off", "claimed"]])
def test_a_complete_ticket_is_done(verbs: list[str]) -> None:
    session = receive(*verbs)
    assert not session.settle(0, 2.0), "it is still wanted"
    session.complete(2.0)
    assert session.state is ReceiveState.DONE


@pytest.mark.parametrize("verbs", [[], ["withdraw"], ["claimed", "broke_off", "withdraw"]])
def test_what_cannot_be_complete_is_our_bug(verbs: list[str]) -> None:
    with pytest.raises(IllegalTransitionError):
        receive(*verbs).complete(2.0)


def test_the_owner_hears_of_a_broken_block_while_it_wants_the_ticket() -> None:
    session = receive("claimed")
    assert session.broke_off(1.0)
    assert session.broke_off(1.0)
    session.withdraw(1.0)
    assert not session.broke_off(1.0)


def test_the_time_of_a_receive_begins_with_its_first_block() -> None:
    session = ReceiveSession(0.0)
    session.claimed(5.0)
    session.claimed(6.0)
    assert session.began_s == 5.0


@pytest.mark.parametrize("session", [send("cancel"), send("fail"), receive("claimed", "withdraw")])
def test_draining_is_forced_once(session: SendSession | ReceiveSession) -> None:
    assert not session.must_be_forced(1.0 + DRAIN_S)
    assert session.must_be_forced(1.1 + DRAIN_S)
    assert not session.must_be_forced(1.2 + DRAIN_S)


@pytest.mark.parametrize(
    "session", [send(), send("finish"), receive(), receive("claimed"), receive("claimed", "broke_off")]
)
def test_what_is_wanted_is_never_forced(session: SendSession | ReceiveSession) -> None:
    assert not session.must_be_forced(1e9)


@given(st.lists(st.sampled_from(["finish", "cancel", "fail", "settle"]), max_size=12))
def test_any_order_ends_a_push_once(verbs: list[str]) -> None:
    session = SendSession(0.0)
    for now, verb in enumerate(verbs):
        if session.is_over:
            break
        if verb == "settle":
            session.settle(0, 0, float(now))
        else:
            getattr(session, verb)(float(now))
    if not session.is_over:
        session.cancel(100.0)
        assert session.settle(0, 0, 100.0)
    assert session.state.value in OUTCOMES
    assert not session.fail(101.0), "what is over cannot fail"


def test_every_end_has_a_name_in_the_metrics() -> None:
    for table in (SEND, RECEIVE):
        finals = {state.value for state in table.arrows if table.is_final(state)}
        assert finals == set(OUTCOMES)
