"""A peer that hangs: what was cancelled or withdrawn ends all the same, by force, and the pool serves on."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from kv_harness import DIRECT, MAPPED, UNREADABLE, remote, works

from kvtransfer.events import PushEnded, PushFailed, Withdrawn
from kvtransfer.session import DRAIN_S
from kvtransfer.ticket import decode_ticket, encode_ticket

BIG = {"num_blocks": 64, "block_bytes": 1 << 20}
# A block is more than the buffers of a socket hold.
HUGE = {"num_blocks": 6, "block_bytes": 24 << 20}


@pytest.fixture(params=["tcp", "ucx", "ucx over tcp", MAPPED, UNREADABLE, DIRECT])
def scheme(request, monkeypatch) -> str:
    if request.param == "ucx over tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
        return "ucx"
    return str(request.param)


def test_a_cancelled_push_to_a_receiver_that_hangs(nodes, scheme):
    p, q = nodes(scheme, "P", seed=1, **HUGE), nodes(scheme, "Q", **HUGE)
    with remote(scheme, "D", **HUGE) as d:
        other = q.grant([0, 1, 2], sender=p)
        p.plane.push(other, [(0, 3)])
        q.wait_for(lambda: q.arrived(other.ticket_id) == {0})
        ticket = decode_ticket(d.call("grant", list(range(4))))
        p.plane.push(ticket, [(0, 0)])
        p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})
        os.kill(d.process.pid, signal.SIGSTOP)
        try:
            p.plane.push(ticket, [(1, 1), (2, 2), (3, 3)])
            (push,) = [each for each in p.plane._context.sends.all_pushes() if each.ticket == ticket]
            p.wait_for(lambda: push.posted)
            p.plane.cancel_push(ticket.ticket_id)
            p.plane.tick(time.monotonic() + 2 * DRAIN_S)
            p.plane.push(other, [(1, 4)])
            assert p.wait_kind(PushEnded, ticket.ticket_id).blocks_sent == 1
            # Another receiver's push goes on as if nothing had been.
            p.plane.push(other, [(2, 5)])
            q.wait_for(lambda: q.arrived(other.ticket_id) == {0, 1, 2})
            assert np.array_equal(q.pool[:3], p.pool[3:6])
            q.plane.complete(other.ticket_id)
            p.wait_for(lambda: p.sent(other.ticket_id) == {0, 1, 2})
            p.plane.finish_push(other.ticket_id)
            assert p.plane.stats().open_pushes == 0
        finally:
            os.kill(d.process.pid, signal.SIGCONT)
        # It was only slow, and nobody declared it dead.
        later = decode_ticket(d.call("grant", [5]))
        p.plane.push(later, [(0, 2)])
        d.call("wait_arrived", later.ticket_id, 1)
        assert d.call("block", 5) == p.pool[2].tobytes()


def test_a_withdrawn_ticket_of_a_sender_that_hangs(nodes, scheme):
    d, q = nodes(scheme, "D", **BIG), nodes(scheme, "Q", seed=2, **BIG)
    works(q, d, 60)
    with remote(scheme, "P", seed=1, **BIG) as p:
        ticket = d.grant(range(48), sender=(p.id, p.epoch))
        p.start("push", encode_ticket(ticket), [(index, index) for index in range(48)])
        d.wait_for(lambda: d.arrived(ticket.ticket_id))
        os.kill(p.process.pid, signal.SIGSTOP)
        d.plane.withdraw(ticket.ticket_id)
        d.plane.tick(time.monotonic() + 2 * DRAIN_S)
        d.wait_event(Withdrawn(ticket.ticket_id))
        d.pool[:] = 0xEE
        os.kill(p.process.pid, signal.SIGCONT)
        p.result()
        works(q, d, 61)
        assert (np.delete(d.pool, 61, axis=0) == 0xEE).all(), "a late block was written"


def test_a_fence_ends_what_is_under_way_and_nothing_else(nodes, scheme):
    p, d = nodes(scheme, "P", seed=1, **BIG), nodes(scheme, "D", **BIG)
    works(p, d, 0)
    ticket = d.grant(range(1, 49), sender=p)
    p.plane.push(ticket, [(index, index) for index in range(48)])
    p.plane.fence(d.id, d.epoch)
    p.wait_for(lambda: p.plane.stats().open_pushes == 0 or len(p.sent(ticket.ticket_id)) == 48)
    if len(p.sent(ticket.ticket_id)) < 48:
        p.wait_kind(PushFailed, ticket.ticket_id)
    p.plane.cancel_push(ticket.ticket_id)
    p.wait_kind(PushEnded, ticket.ticket_id)
    d.plane.withdraw(ticket.ticket_id)
    d.wait_event(Withdrawn(ticket.ticket_id))
    d.plane.fence(p.id, p.epoch)
    works(p, d, 3)
    works(p, d, 4)


def test_a_link_that_stands_still_delays_nobody_else(nodes, scheme):
    p, q = nodes(scheme, "P", seed=1, **BIG), nodes(scheme, "Q", **BIG)
    with remote(scheme, "D", **BIG) as d:
        stuck = decode_ticket(d.call("grant", list(range(48))))
        p.plane.push(stuck, [(0, 0)])
        p.wait_for(lambda: p.sent(stuck.ticket_id) == {0})
        os.kill(d.process.pid, signal.SIGSTOP)
        p.plane.push(stuck, [(index, index) for index in range(1, 48)])
        for block in range(8):
            works(p, q, block)
        assert p.plane.stats().open_pushes == 1
        assert len(p.sent(stuck.ticket_id)) < 48
        os.kill(d.process.pid, signal.SIGCONT)
        p.wait_for(lambda: len(p.sent(stuck.ticket_id)) == 48)
        p.plane.finish_push(stuck.ticket_id)


def test_connections_with_a_dead_life_go_at_once_and_the_next_life_is_served(nodes, scheme):
    p, old = nodes(scheme, "P", seed=1, **BIG), nodes(scheme, "D", epoch=1, **BIG)
    works(p, old, 0)
    new = nodes(scheme, "D", epoch=2, **BIG)
    works(p, new, 0)
    before = p.plane.stats().connections
    p.plane.peer_dead("D", 1)
    # Over shared memory the worker goes too, with all its connections (ADR 15).
    p.wait_for(lambda: p.plane.stats().connections < before)
    works(p, new, 1)
    assert p.plane.stats().connections == before - 1
