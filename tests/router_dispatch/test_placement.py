"""The books: what is put down to a node is given back exactly once, and refusals count for a while."""

from __future__ import annotations

import pytest

from cluster.request import RequestId, RequestKey
from cluster.wire import NodeLoad, Pong, Refused, RefusedPeer
from router.naming import PromptNames
from router.placement import MAX_RETRY_S, MIN_RETRY_S, Placer
from router.policy import Booking, Busy, Demand, NoPair
from router.queue import Wanted
from tests.router_dispatch.rig import NoIndex
from tests.router_dispatch.test_registry import A, B, Eyes, P, record

KEY = RequestKey(RequestId("r"), 1)


class Books:
    """A placer over nodes that have just answered; its clock is the real one, for nothing here lasts."""

    def __init__(self, *records: object, monotonic: float) -> None:
        self.eyes = Eyes()
        self.eyes.now = monotonic
        self.eyes.see(*records)  # type: ignore[arg-type]
        self.eyes.pong(*(entry.party for entry in self.eyes.registry.all_nodes()))
        self.placer = Placer(self.eyes.registry, NoIndex())  # type: ignore[arg-type]

    def place(self, prompt_len: int = 10) -> Booking | Busy | NoPair:
        return self.placer.try_place(Wanted(Demand(prompt_len, prompt_len + 10), PromptNames((1,), "")))

    def booked(self, prompt_len: int = 10) -> Booking:
        outcome = self.place(prompt_len)
        assert isinstance(outcome, Booking)
        return outcome

    def accounts(self) -> dict[str, tuple[int, int]]:
        return {n.party.id: (n.own_requests, n.own_tokens) for n in self.eyes.registry.all_nodes()}


def books(*records: object) -> Books:
    import time

    return Books(*(records or (P, A)), monotonic=time.monotonic())


def test_a_burst_is_spread_before_any_node_reports() -> None:
    b = books(P, A, B, record("q", role="prefill"))
    chosen = [b.booked().placement for _ in range(4)]
    assert sorted(p.decode.id for p in chosen) == ["a", "a", "b", "b"]
    assert sorted(p.prefill.id for p in chosen) == ["p", "p", "q", "q"]


def test_given_back_exactly_once() -> None:
    b = books()
    first, second = b.booked(10), b.booked(20)
    assert b.accounts() == {"p": (0, 30), "a": (2, 0)}
    b.placer.prefilled(first)
    b.placer.prefilled(first)
    assert b.accounts() == {"p": (0, 20), "a": (2, 0)}
    for _ in range(3):
        b.placer.release(first)
    assert b.accounts() == {"p": (0, 20), "a": (1, 0)}
    b.placer.release(second)
    assert b.accounts() == {"p": (0, 0), "a": (0, 0)}


def test_a_booking_of_an_earlier_life_does_not_touch_the_next() -> None:
    b = books()
    booking = b.booked()
    assert b.placer.is_usable(booking.placement)
    b.eyes.see(record("a", epoch=2))
    assert not b.placer.is_usable(booking.placement)
    b.placer.granted(booking)
    b.placer.refused(booking, None)
    b.placer.release(booking)
    assert b.accounts() == {"p": (0, 0), "a": (0, 0)}


def test_a_suspect_node_is_not_usable() -> None:
    b = books()
    booking = b.booked()
    b.eyes.run_for(5.0, P.party)
    assert not b.placer.is_usable(booking.placement)
    b.placer.release(booking)
    assert b.accounts() == {"p": (0, 0), "a": (0, 0)}


def test_after_a_refusal_one_request_asks_and_the_others_wait() -> None:
    b = books()
    refused, other = b.booked(), b.booked()
    assert b.placer.refused(refused, Refused(KEY, "full", 3.0)) == 3.0
    b.placer.release(refused)
    assert isinstance(b.place(), Busy)
    entry = b.eyes.registry.get(A.party)
    assert entry is not None
    entry.refused_until_s = 0.001  # the pause is over
    probe = b.booked()
    assert probe.is_probe
    assert isinstance(b.place(), Busy)
    b.placer.granted(probe)
    assert not b.booked().is_probe
    del other


def test_a_probe_that_ends_without_an_answer_lets_the_next_one_ask() -> None:
    b = books()
    b.placer.refused(b.booked(), Refused(KEY, "full", 3.0))
    entry = b.eyes.registry.get(A.party)
    assert entry is not None
    entry.refused_until_s = 0.001
    probe = b.booked()
    b.placer.release(probe)
    assert b.booked().is_probe


def test_room_made_by_an_ended_request_ends_the_pause() -> None:
    b = books()
    running, refused = b.booked(), b.booked()
    b.placer.granted(running)
    b.placer.refused(refused, Refused(KEY, "full", 3.0))
    b.placer.release(refused)
    assert isinstance(b.place(), Busy), "the refused one's own end makes no room"
    b.placer.release(running)
    assert b.booked().is_probe


def test_the_pause_is_neither_a_spin_nor_for_ever() -> None:
    b = books()
    assert b.placer.refused(b.booked(), Refused(KEY, "full", 0.0)) == MIN_RETRY_S
    b = books()
    assert b.placer.refused(b.booked(), Refused(KEY, "full", 9999.0)) == MAX_RETRY_S


def test_a_node_that_is_joining_is_waited_for() -> None:
    b = books(P)
    assert isinstance(b.place(), NoPair)
    b.eyes.see(A)
    assert isinstance(b.place(), Busy)
    b.eyes.pong(A.party)
    b.booked()


def test_readiness_and_sizes() -> None:
    assert books(P).placer.readiness().reason == "no decode node is alive"
    assert books(A).placer.readiness().reason == "no prefill node is alive"
    assert "do not fit" in books(P, record("a", fingerprint="g")).placer.readiness().reason
    assert books(P, A).placer.readiness().ready
    assert books(P).placer.max_request_tokens() is None
    small = record("s", num_blocks=2)
    assert books(P, small).placer.max_request_tokens() == 32
    assert books(P, small, A).placer.max_request_tokens() == 512


def test_what_a_node_reports_and_what_was_placed_since_are_added() -> None:
    """Another router's requests are in the reports, our newest are not."""
    b = books(P, A, B)
    for party, count in ((A.party, 5), (B.party, 3)):
        b.eyes.registry.on_pong(party, Pong(2, NodeLoad(num_running=count)), b.eyes.now)
    assert [b.booked().placement.decode.id for _ in range(4)] == ["b", "b", "a", "b"]


FACTS = {"KV dtype": "float32", "weights": "a" * 80, "layers": "30"}


def test_ready_says_in_what_the_nodes_differ() -> None:
    prefill = record("p", role="prefill", layout=FACTS)
    other = record("a", fingerprint="g", layout={**FACTS, "KV dtype": "bfloat16"})
    reason = books(prefill, other).placer.readiness().reason
    assert reason == "prefill node p and decode node a do not fit: KV dtype float32 and bfloat16"
    foreign = record("a", fingerprint="g", layout={**FACTS, "weights": "b" * 80})
    assert len(books(prefill, foreign).placer.readiness().reason) < 200
    silent = record("a", fingerprint="g")
    assert "their models or KV layouts differ" in books(prefill, silent).placer.readiness().reason
    # A second node that fits is enough.
    assert books(prefill, other, record("b", layout=FACTS)).placer.readiness().ready


def test_nodes_of_different_block_sizes_are_paired_and_named_apart() -> None:
    b = books(record("p", role="prefill", block_size=16), record("a", block_size=48))
    assert b.placer.readiness().ready
    placement = b.booked().placement
    assert (placement.prefill_block_size, placement.decode_block_size) == (16, 48)
    names = PromptNames(tuple(range(480)), "")
    seed, ours = names.of("f", 16)
    assert (seed, len(ours)) == (names.of("f", 48)[0], 30)
    assert not set(ours) & set(names.of("f", 48)[1]), "a hit on one node would count for the other"
    alike = PromptNames((5,) * 480, "")
    assert not set(alike.of("f", 16)[1]) & set(alike.of("f", 32)[1])


def test_a_misfit_is_logged_once_when_it_joins(caplog: pytest.LogCaptureFixture) -> None:
    b = books(record("p", role="prefill", layout=FACTS))
    b.eyes.see(record("a", fingerprint="g", layout={**FACTS, "layers": "31"}))
    b.eyes.see(record("a", fingerprint="g", layout={**FACTS, "layers": "31"}))
    told = [r.getMessage() for r in caplog.records if "do not fit" in r.getMessage()]
    assert told == ["decode node a and prefill node p do not fit: layers 31 and 30"]


def test_a_pair_that_cannot_exchange_blocks_is_not_ready_until_another_comes() -> None:
    b = books(P, A)
    refused = RefusedPeer("a", A.party.epoch, "came out on tcp, rdma is required")
    b.eyes.registry.on_pong(P.party, Pong(1, NodeLoad(), (refused,)), b.eyes.now)
    readiness = b.placer.readiness()
    assert (readiness.ready, readiness.reason) == (False, "p: came out on tcp, rdma is required")
    outcome = b.place()
    assert isinstance(outcome, NoPair)
    assert outcome.reason == readiness.reason
    b.eyes.see(B)
    b.eyes.pong(B.party)
    assert b.placer.readiness().ready
    assert b.booked().placement.decode.id == "b"
