"""A sender that is killed may leave a receiver's shared-memory queue stuck: it gets another one, and nobody waits for
ever at the old one.
"""

from __future__ import annotations

import pytest
from kv_harness import MAPPED, Node, remote, works

from kvtransfer.events import PushFailed
from kvtransfer.ticket import encode_ticket
from kvtransfer.ucx_hearing import HearingTest
from kvtransfer.ucx_inbound import Intake


def address(node: Node) -> bytes:
    return node.plane.hello().addresses["ucx"]


def send_one(p, d: Node) -> None:
    ticket = d.grant([1])
    p.call("push", encode_ticket(ticket), [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    d.plane.complete(ticket.ticket_id)


@pytest.mark.parametrize("scheme", ["ucx", MAPPED])
@pytest.mark.parametrize("told", [True, False])
def test_a_receiver_gets_another_worker_when_a_sender_is_lost(nodes, scheme, told):
    """Whoever notices first: the cluster that declares it dead, or UCX."""
    d, q = nodes(scheme, "D"), nodes(scheme, "Q", seed=2)
    works(q, d, 3)
    with remote(scheme, "P", seed=1) as p:
        send_one(p, d)
        before = address(d)
        p.process.kill()
        p.process.join()
        if told:
            d.plane.peer_dead(p.id, p.epoch)
        d.wait_for(lambda: address(d) != before)
    works(q, d, 4)


def test_a_sender_gets_another_worker_when_a_receiver_is_lost(nodes):
    p, q = nodes(MAPPED, "P", seed=1), nodes(MAPPED, "Q")
    works(p, q, 3)
    road = p.plane._roads["ucx"]
    before = road._sender
    p.plane.peer_dead(q.id, q.epoch)
    p.wait_for(lambda: road._sender is not before)
    works(p, nodes(MAPPED, "D"), 3)


def test_over_tcp_everyone_has_a_queue_of_his_own(nodes, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    d, q = nodes("ucx", "D"), nodes("ucx", "Q", seed=2)
    with remote("ucx", "P", seed=1) as p:
        send_one(p, d)
        before = address(d)
        d.plane.peer_dead(p.id, p.epoch)
        works(q, d, 4)
        assert address(d) == before


@pytest.fixture
def tests_made(monkeypatch) -> list[HearingTest]:
    made: list[HearingTest] = []
    init = HearingTest.__init__

    def watched(self, *arguments):
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(HearingTest, "__init__", watched)
    return made


def test_a_worker_that_hears_serves_its_tickets_to_their_end(nodes, tests_made):
    d, q = nodes("ucx", "D"), nodes("ucx", "Q", seed=2)
    kept = d.grant([3, 4], sender=q)
    q.plane.push(kept, [(0, 0)])
    d.wait_for(lambda: d.arrived(kept.ticket_id) == {0})
    with remote("ucx", "P", seed=1) as p:
        send_one(p, d)
        d.plane.peer_dead(p.id, p.epoch)
        d.wait_for(lambda: tests_made and tests_made[0].intake.hears)
    assert d.plane.stats().blocks_refused == 0
    q.plane.push(kept, [(1, 1)])
    d.wait_for(lambda: d.arrived(kept.ticket_id) == {0, 1})
    d.plane.complete(kept.ticket_id)


@pytest.mark.parametrize("scheme", ["ucx", MAPPED])
def test_a_deaf_worker_ends_and_its_senders_are_told(nodes, monkeypatch, tests_made, scheme):
    monkeypatch.setattr("kvtransfer.ucx_hearing._PATIENCE_S", 0.2)
    d, q = nodes(scheme, "D"), nodes(scheme, "Q", seed=2)
    kept = d.grant([3, 4], sender=q)
    q.plane.push(kept, [(0, 0)])
    d.wait_for(lambda: d.arrived(kept.ticket_id) == {0})
    turn, deaf = Intake.turn, d.plane._roads["ucx"]._intake
    monkeypatch.setattr(Intake, "turn", lambda self: False if self is deaf else turn(self))
    d.plane.peer_dead("P", 1)  # nobody we know: no reason to test
    works(q, nodes(scheme, "E"), 1)
    assert tests_made == []
    r = nodes(scheme, "R", seed=3)
    monkeypatch.setattr(Intake, "turn", turn)
    works(r, d, 5)
    monkeypatch.setattr(Intake, "turn", lambda self: False if self is deaf else turn(self))
    d.plane.peer_dead("R", 1)
    q.plane.push(kept, [(1, 1)])
    failed = q.wait_kind(PushFailed, kept.ticket_id)
    assert failed.reason == "the receiver has closed this address"
    d.plane.withdraw(kept.ticket_id)
    works(q, d, 6)


def test_a_worker_that_is_retired_already_is_tested_too(nodes, tests_made):
    d, q = nodes("ucx", "D"), nodes("ucx", "Q", seed=2)
    kept = d.grant([3, 4], sender=q)
    q.plane.push(kept, [(0, 0)])
    others = [nodes("ucx", name, seed=3) for name in ("R", "S")]
    for block, other in enumerate(others):
        works(other, d, 10 + block)
    for count, other in enumerate(others, 1):
        d.plane.peer_dead(other.id, other.epoch)
        d.wait_for(lambda count=count: len(tests_made) == count and tests_made[-1].intake.hears)
    assert tests_made[0].intake is tests_made[1].intake
    q.plane.push(kept, [(1, 1)])
    d.wait_for(lambda: d.arrived(kept.ticket_id) == {0, 1})
    d.plane.complete(kept.ticket_id)
    d.wait_for(lambda: not d.plane._roads["ucx"]._hearing_tests)
