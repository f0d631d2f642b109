"""The one contract every transport keeps. All waits are on events, with a deadline."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from kv_harness import SCHEMES, Node, io_threads, open_fds

from kvtransfer.errors import (
    LayoutMismatchError,
    PeerUnreachableError,
    PlaneClosedError,
    TicketError,
)
from kvtransfer.events import BlocksArrived, PushEnded, PushFailed, Withdrawn
from kvtransfer.ticket import BlockHandle, new_ticket_id

# Descriptors of a connection that has just been made may still come and go.
WARM_UP = 20

pytestmark = pytest.mark.parametrize("scheme", SCHEMES)


def pair(nodes, scheme: str, **options) -> tuple[Node, Node]:
    return nodes(scheme, "P", seed=1, **options), nodes(scheme, "D", **options)


def move(p: Node, d: Node, items: list[tuple[int, int]]) -> None:
    """Send local block -> remote block and wait until all of it has landed."""
    ticket = d.grant([remote for _, remote in items])
    p.plane.push(ticket, [(index, local) for index, (local, _) in enumerate(items)])
    d.wait_for(lambda: len(d.arrived(ticket.ticket_id)) == len(items))
    p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == len(items))
    d.plane.complete(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)


@pytest.mark.parametrize("block_bytes", [1, 4096, 737280])
def test_scattered_blocks_arrive_exactly_chunk_by_chunk(nodes, scheme, block_bytes):
    p, d = pair(nodes, scheme, block_bytes=block_bytes)
    theirs, ours = [9, 2, 15, 0, 6, 11], [3, 14, 1, 8, 0, 12]
    before = p.pool.copy()
    ticket = d.grant(theirs)
    for chunk in ([5, 0], [2], [1, 4, 3]):
        p.plane.push(ticket, [(index, ours[index]) for index in chunk])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == set(range(6)))
    p.wait_for(lambda: p.sent(ticket.ticket_id) == set(range(6)))
    for their, our in zip(theirs, ours, strict=True):
        assert np.array_equal(d.pool[their], p.pool[our])
    untouched = [block for block in range(16) if block not in theirs]
    assert not d.pool[untouched].any()
    assert np.array_equal(p.pool, before)

    d.plane.complete(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)
    sent, received = p.plane.stats(), d.plane.stats()
    assert (sent.blocks_sent, sent.bytes_sent) == (6, 6 * block_bytes)
    assert (received.blocks_received, received.bytes_received) == (6, 6 * block_bytes)
    assert (sent.open_pushes, received.open_tickets, received.blocks_refused) == (0, 0, 0)


def test_both_directions_and_several_tickets_at_once(nodes, scheme):
    a = nodes(scheme, "A", seed=1, block_bytes=65536)
    b = nodes(scheme, "B", seed=2, block_bytes=65536)
    to_b = [b.grant([0, 2, 4]), b.grant([1, 3, 5])]
    to_a = a.grant([6, 7])
    for index in range(3):
        for number, ticket in enumerate(to_b):
            a.plane.push(ticket, [(index, 8 + 3 * number + index)])
    b.plane.push(to_a, [(0, 8), (1, 9)])
    for ticket in to_b:
        b.wait_for(lambda ticket=ticket: b.arrived(ticket.ticket_id) == {0, 1, 2})
    a.wait_for(lambda: a.arrived(to_a.ticket_id) == {0, 1})
    assert np.array_equal(b.pool[[0, 2, 4, 1, 3, 5]], a.pool[8:14])
    assert np.array_equal(a.pool[6:8], b.pool[8:10])


def test_a_ticket_that_was_never_granted_changes_nothing(nodes, scheme):
    p, d = pair(nodes, scheme)
    granted = d.grant([1])
    forged = msgspec.structs.replace(granted, ticket_id=new_ticket_id())
    p.plane.push(forged, [(0, 4)])
    d.wait_for(lambda: d.plane.stats().blocks_refused >= 1)
    assert not d.pool.any()
    # And the connection is none the worse for it.
    p.plane.push(granted, [(0, 5)])
    d.wait_event(BlocksArrived(granted.ticket_id, (0,)))
    assert np.array_equal(d.pool[1], p.pool[5])


def test_a_block_is_written_once(nodes, scheme):
    p, d = pair(nodes, scheme)
    other = nodes(scheme, "P2", seed=2)
    ticket = d.grant([3, 4])
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    other.plane.push(ticket, [(0, 1)])
    d.wait_for(lambda: d.plane.stats().blocks_refused == 1)
    assert np.array_equal(d.pool[3], p.pool[0])
    # A second sender may supply what is missing.
    other.plane.push(ticket, [(1, 5)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0, 1})
    assert np.array_equal(d.pool[4], other.pool[5])


def test_after_complete_the_ticket_is_void(nodes, scheme):
    p, d = pair(nodes, scheme)
    ticket = d.grant([3])
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    d.plane.complete(ticket.ticket_id)
    d.plane.complete(ticket.ticket_id)
    late = nodes(scheme, "P2", seed=2)
    late.plane.push(ticket, [(0, 1)])
    d.wait_for(lambda: d.plane.stats().blocks_refused >= 1)
    assert np.array_equal(d.pool[3], p.pool[0])


def test_only_the_named_sender_may_fill_a_ticket(nodes, scheme):
    p, d = pair(nodes, scheme)
    other = nodes(scheme, "P2", seed=2)
    ticket = d.grant([3], sender=p)
    other.plane.push(ticket, [(0, 1)])
    d.wait_for(lambda: d.plane.stats().blocks_refused >= 1)
    assert not d.pool.any()
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[3], p.pool[0])


def test_a_stale_generation_is_refused(nodes, scheme):
    if scheme.startswith("ucx"):
        pytest.skip("ucx carries no generation: the ticket number is the fence")
    p, d = pair(nodes, scheme)
    ticket = d.grant([3])
    p.plane.push(msgspec.structs.replace(ticket, handles=(BlockHandle(3, 6),)), [(0, 0)])
    d.wait_for(lambda: d.plane.stats().blocks_refused == 1)
    assert not d.pool.any()


def test_cancel_then_withdraw_then_nothing_is_written(nodes, scheme):
    p, d = pair(nodes, scheme, num_blocks=64, block_bytes=1 << 20)
    ticket = d.grant(range(64))
    p.plane.push(ticket, [(index, index) for index in range(64)])
    p.plane.cancel_push(ticket.ticket_id)
    ended = p.wait_kind(PushEnded, ticket.ticket_id)
    assert len(p.sent(ticket.ticket_id)) == ended.blocks_sent
    d.plane.withdraw(ticket.ticket_id)
    d.plane.withdraw(ticket.ticket_id, blocks_sent=ended.blocks_sent)
    d.wait_event(Withdrawn(ticket.ticket_id))
    d.pool[:] = 0xEE

    with pytest.raises(TicketError):
        p.plane.push(ticket, [(63, 0)])
    # A block of a later ticket is behind every late byte of the first one.
    later = d.grant([5])
    p.plane.push(later, [(0, 9)])
    d.wait_for(lambda: d.arrived(later.ticket_id) == {0})
    assert np.array_equal(d.pool[5], p.pool[9])
    assert (np.delete(d.pool, 5, axis=0) == 0xEE).all()
    assert d.seen.count(Withdrawn(ticket.ticket_id)) == 1
    assert p.plane.stats().open_pushes == 1


def test_withdraw_in_full_flight(nodes, scheme):
    p, d = pair(nodes, scheme, num_blocks=64, block_bytes=1 << 20)
    ticket = d.grant(range(64))
    p.plane.push(ticket, [(index, index) for index in range(64)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id))
    d.plane.withdraw(ticket.ticket_id)
    d.wait_event(Withdrawn(ticket.ticket_id))
    d.pool[:] = 0xEE
    p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == 64)
    later = d.grant([5])
    p.plane.push(later, [(0, 9)])
    d.wait_for(lambda: d.arrived(later.ticket_id) == {0})
    assert (np.delete(d.pool, 5, axis=0) == 0xEE).all()


def test_a_withdrawn_ticket_is_refused_from_the_start(nodes, scheme):
    p, d = pair(nodes, scheme)
    ticket = d.grant([2])
    d.plane.withdraw(ticket.ticket_id)
    d.wait_event(Withdrawn(ticket.ticket_id))
    d.plane.withdraw(ticket.ticket_id)
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.plane.stats().blocks_refused >= 1)
    assert not d.pool.any()
    assert d.seen.count(Withdrawn(ticket.ticket_id)) == 1
    # Its blocks are free for another ticket.
    d.grant([2])


def test_cancel_is_always_answered(nodes, scheme):
    p, d = pair(nodes, scheme)
    p.plane.cancel_push(77)
    p.wait_event(PushEnded(77, 0))
    ticket = d.grant([1, 2])
    p.plane.push(ticket, [(0, 0), (1, 1)])
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0, 1})
    p.plane.finish_push(ticket.ticket_id)
    p.plane.cancel_push(ticket.ticket_id)
    p.wait_event(PushEnded(ticket.ticket_id, 2))
    p.plane.finish_push(4711)


def test_another_layout_is_refused(nodes, scheme):
    p = nodes(scheme, "P")
    for other in (nodes(scheme, "D1", fingerprint="layout-b"), nodes(scheme, "D2", block_bytes=8192)):
        with pytest.raises(LayoutMismatchError):
            p.plane.push(other.grant([0]), [(0, 0)])
    assert p.plane.stats().open_pushes == 0


def test_bad_pushes_queue_nothing(nodes, scheme):
    p, d = pair(nodes, scheme)
    ticket = d.grant([0, 1])
    for items in ([(2, 0)], [(-1, 0)], [(0, 16)], [(0, -1)], [(0, 1), (0, 2)]):
        with pytest.raises(TicketError):
            p.plane.push(ticket, items)
    assert p.plane.stats().open_pushes == 0
    p.plane.push(ticket, [(0, 3)])
    with pytest.raises(TicketError):
        p.plane.push(ticket, [(1, 2), (0, 2)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    with pytest.raises(TicketError):
        d.plane.complete(ticket.ticket_id)
    assert not d.pool[1].any()


def test_bad_consents_are_refused(nodes, scheme):
    d = nodes(scheme, "D")
    ticket = d.grant([0])
    for ticket_id, handles in (
        (ticket.ticket_id, [BlockHandle(1, 0)]),
        (5, [BlockHandle(0, 0)]),
        (5, [BlockHandle(16, 0)]),
        (5, [BlockHandle(2, 0), BlockHandle(2, 1)]),
        (5, []),
    ):
        with pytest.raises(TicketError):
            d.plane.expect(ticket_id, handles)
    assert d.plane.stats().open_tickets == 1


def test_a_dead_peer_is_refused_and_its_tickets_come_back(nodes, scheme):
    p, d = pair(nodes, scheme)
    other = nodes(scheme, "P2", seed=2)
    of_p, of_other = d.grant([0, 1], sender=p), d.grant([2], sender=other)
    p.plane.push(of_p, [(0, 0)])
    d.wait_for(lambda: d.arrived(of_p.ticket_id) == {0})
    d.plane.peer_dead(p.id, p.epoch)
    d.wait_event(Withdrawn(of_p.ticket_id))
    d.pool[:] = 0xEE
    again = d.grant([0, 1])
    p.plane.push(again, [(0, 0)])
    other.plane.push(of_other, [(0, 3)])
    d.wait_for(lambda: d.arrived(of_other.ticket_id) == {0})
    assert (np.delete(d.pool, 2, axis=0) == 0xEE).all()
    assert np.array_equal(d.pool[2], other.pool[3])


def test_pushes_to_a_dead_peer_fail(nodes, scheme):
    p, d = pair(nodes, scheme)
    ticket = d.grant([0, 1])
    p.plane.push(ticket, [(0, 0)])
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})
    p.plane.peer_dead(d.id, d.epoch)
    p.wait_kind(PushFailed, ticket.ticket_id)
    with pytest.raises(PeerUnreachableError):
        p.plane.push(ticket, [(1, 1)])


def test_a_closed_receiver_fails_the_push(nodes, scheme):
    p, d = pair(nodes, scheme, block_bytes=1 << 20)
    ticket = d.grant(range(16))
    p.plane.push(ticket, [(0, 0)])
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})
    d.close()
    p.plane.push(ticket, [(index, index) for index in range(1, 16)])
    p.wait_kind(PushFailed, ticket.ticket_id)


def test_no_common_scheme(nodes, scheme):
    other = "inproc" if scheme == "tcp" else "tcp"
    with pytest.raises(PeerUnreachableError):
        nodes(scheme, "P").plane.push(nodes(other, "D").grant([0]), [(0, 0)])


def test_two_hundred_tickets_leave_nothing_behind(nodes, scheme):
    p, d = pair(nodes, scheme)
    for _ in range(WARM_UP):
        move(p, d, [(0, 0)])
        p.seen.clear()
        d.seen.clear()
    fds, threads = open_fds(), io_threads()
    for number in range(200):
        move(p, d, [(number % 16, (number + 3) % 16), ((number + 1) % 16, (number + 7) % 16)])
        p.seen.clear()
        d.seen.clear()
    assert open_fds() == fds
    assert io_threads() == threads
    assert (p.plane.stats().open_pushes, d.plane.stats().open_tickets) == (0, 0)
    assert d.plane.stats().blocks_received == 400 + WARM_UP


def test_close_sends_what_is_queued_and_leaves_nothing(nodes, scheme):
    Node(scheme, "warm-up").close()
    fds = open_fds()
    p, d = pair(nodes, scheme, block_bytes=1 << 20)
    # Not the plane's: a shared pool is open twice, here and in its mapping.
    fds += 2 * sum(node.memory is not None for node in (p, d))
    ticket = d.grant(range(8))
    p.plane.push(ticket, [(index, index) for index in range(8)])
    p.close()
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == set(range(8)))
    assert np.array_equal(d.pool[:8], p.pool[:8])
    p.close()
    d.close()
    d.plane.abort()
    assert io_threads() == []
    assert open_fds() == fds
    for call in (p.plane.hello, lambda: p.plane.push(ticket, []), lambda: p.plane.expect(1, [])):
        with pytest.raises(PlaneClosedError):
            call()


def test_abort_ends_everything_with_an_event(nodes, scheme):
    p, d = pair(nodes, scheme)
    out, into = d.grant([0, 1]), p.grant([0])
    p.plane.push(out, [(0, 0)])
    p.plane.abort()
    p.wait_kind(PushFailed, out.ticket_id)
    p.wait_event(Withdrawn(into.ticket_id))


def test_a_receiver_closed_below_posted_blocks_fails_the_push(nodes, scheme):
    """UCX over shared memory does not notice that a worker is gone while its process lives."""
    p, d = pair(nodes, scheme, num_blocks=64, block_bytes=1 << 20)
    ticket = d.grant(range(64))
    p.plane.push(ticket, [(index, index) for index in range(32)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id))
    d.plane.abort()
    p.plane.push(ticket, [(index, index) for index in range(32, 64)])
    p.wait_for(lambda: p.plane.stats().open_pushes == 0)
    p.wait_kind(PushFailed, ticket.ticket_id)
