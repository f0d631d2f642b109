"""Blocks that the receiver copies out of the sender's pool: when it does, when not, and what a bad offer comes to."""

from __future__ import annotations

import time

import numpy as np
import pytest
from kv_harness import MAPPED, UNREADABLE, Node, remote

from kvtransfer import ucx_outbound, ucx_wire
from kvtransfer.errors import TicketError
from kvtransfer.events import PushEnded, PushFailed, ReceiveFailed, Withdrawn
from kvtransfer.session import DRAIN_S
from kvtransfer.ticket import decode_ticket
from kvtransfer.ucx_offers import MAX_OFFER_BYTES, MAX_OFFERED_BYTES, PeerMemories
from kvtransfer.ucx_wire import NO_SOURCE, Answer, Gone

BLOCK_BYTES = 1 << 20


def pair(nodes, scheme: str = MAPPED, **options) -> tuple[Node, Node]:
    options = {"num_blocks": 64, "block_bytes": BLOCK_BYTES} | options
    return nodes(scheme, "P", seed=1, **options), nodes(scheme, "D", **options)


def lanes(node: Node) -> str:
    (route,) = node.plane.stats().routes
    return route.lanes


def move(p: Node, d: Node, blocks: list[int]) -> None:
    ticket = d.grant(blocks, sender=p)
    p.plane.push(ticket, [(index, block) for index, block in enumerate(blocks)])
    d.wait_for(lambda: len(d.arrived(ticket.ticket_id)) == len(blocks))
    p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == len(blocks))
    assert np.array_equal(d.pool[blocks], p.pool[blocks])
    d.plane.complete(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)


def watch_sends(monkeypatch) -> list[int]:
    """Indexes of blocks that went as messages."""
    sent = []
    send = ucx_outbound.Link._send

    def watched(self, push, item, reply_to):
        sent.append(item.index)
        send(self, push, item, reply_to)

    monkeypatch.setattr(ucx_outbound.Link, "_send", watched)
    return sent


def test_no_block_is_sent_and_both_sides_say_so(nodes, monkeypatch):
    sent = watch_sends(monkeypatch)
    p, d = pair(nodes)
    move(p, d, list(range(40)))
    move(p, d, [3, 1])
    assert sent == []
    for node in (p, d):
        assert lanes(node).startswith("mapped+")
    assert p.plane.stats().transport["ucx"].startswith("mapped+")
    assert (p.plane.stats().blocks_sent, d.plane.stats().blocks_received) == (42, 42)


def test_memory_that_cannot_be_read_is_offered_once(nodes, monkeypatch):
    sent = watch_sends(monkeypatch)
    p, d = pair(nodes, UNREADABLE)
    move(p, d, list(range(40)))
    assert sorted(sent) == list(range(40))
    offered = []
    monkeypatch.setattr(ucx_outbound.Link, "_offer", lambda *_: offered.append(1))
    move(p, d, [3, 1])
    assert offered == []
    assert "mapped" not in lanes(p) + lanes(d) + p.plane.stats().transport["ucx"]


def test_not_over_tcp(nodes, monkeypatch):
    """Who asks for TCP gets it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    sent = watch_sends(monkeypatch)
    p, d = pair(nodes)
    move(p, d, list(range(8)))
    assert sorted(sent) == list(range(8))
    assert lanes(p) == lanes(d) == "tcp"


def test_across_processes(nodes):
    p = nodes(MAPPED, "P", seed=4, num_blocks=32, block_bytes=BLOCK_BYTES)
    with remote("ucx", "D", num_blocks=32, block_bytes=BLOCK_BYTES) as d:
        ticket = decode_ticket(d.call("grant", list(range(32))))
        p.plane.push(ticket, [(index, 31 - index) for index in range(32)])
        d.call("wait_arrived", ticket.ticket_id, 32)
        p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == 32)
        assert lanes(p).startswith("mapped+")
        assert all(d.call("block", index) == p.pool[31 - index].tobytes() for index in (0, 13, 31))
        p.plane.finish_push(ticket.ticket_id)


@pytest.mark.parametrize("source", [64, NO_SOURCE])
def test_a_block_that_is_not_there(nodes, monkeypatch, source):
    p, d = pair(nodes)
    move(p, d, [5])
    introduce = ucx_wire.introduce

    def elsewhere(context, ticket_id, receiver, reply_to, blocks, offer):
        blocks = [block._replace(source=source) if block.position == 1 else block for block in blocks]
        return introduce(context, ticket_id, receiver, reply_to, blocks, offer)

    monkeypatch.setattr(ucx_outbound, "introduce", elsewhere)
    ticket = d.grant([0, 1, 2])
    p.plane.push(ticket, [(0, 0), (1, 1), (2, 2)])
    failed = d.wait_kind(ReceiveFailed, ticket.ticket_id)
    assert failed == ReceiveFailed(ticket.ticket_id, "block 1 was offered where there is none")
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0, 2})
    assert not d.pool[1].any()
    # The sender is told all the same: nothing of it is read any more.
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0, 1, 2})
    d.plane.withdraw(ticket.ticket_id)
    monkeypatch.undo()
    move(p, d, [7])


@pytest.mark.parametrize("digest", ["sampled", "full"])
def test_a_block_that_changes_while_it_is_offered(nodes, monkeypatch, digest):
    """As when a sender gave up a receiver that was only slow, and has used the block for somebody else."""
    p, d = pair(nodes, digest=digest)
    copy = PeerMemories.copy

    def late(self, ticket_id, said):
        p.pool[1] = 0x77
        copy(self, ticket_id, said)

    monkeypatch.setattr(PeerMemories, "copy", late)
    ticket = d.grant([0, 1, 2])
    p.plane.push(ticket, [(0, 0), (1, 1), (2, 2)])
    failed = d.wait_kind(ReceiveFailed, ticket.ticket_id)
    assert failed == ReceiveFailed(ticket.ticket_id, "block 1 does not hold what was sent")
    d.plane.withdraw(ticket.ticket_id)


def test_a_cancelled_push_waits_for_what_is_offered_and_no_more(nodes, monkeypatch):
    p, d = pair(nodes, num_blocks=160)
    move(p, d, [5])
    # The receiver does not get to it for now.
    road, turn = d.plane._roads["ucx"], d.plane._roads["ucx"]._intake.turn
    monkeypatch.setattr(road._intake, "turn", lambda: None)
    ticket = d.grant(range(160))
    p.plane.push(ticket, [(index, index) for index in range(160)])
    (push,) = p.plane._context.sends.all_pushes()
    p.wait_for(lambda: push.posted)
    p.plane.cancel_push(ticket.ticket_id)
    p.seen += p.plane.poll()
    assert not any(isinstance(event, PushEnded) for event in p.seen)
    monkeypatch.setattr(road._intake, "turn", turn)
    road._post(lambda: None)
    ended = p.wait_kind(PushEnded, ticket.ticket_id)
    assert 0 < ended.blocks_sent <= MAX_OFFERED_BYTES // BLOCK_BYTES
    d.wait_for(lambda: len(d.arrived(ticket.ticket_id)) == ended.blocks_sent)
    d.plane.withdraw(ticket.ticket_id, blocks_sent=ended.blocks_sent)
    d.wait_event(Withdrawn(ticket.ticket_id))


def test_nobody_reads_for_a_withdrawn_ticket(nodes):
    p, d = pair(nodes)
    move(p, d, [5])
    ticket = d.grant(range(40), sender=p)
    d.pool[:] = 0xEE
    d.plane.withdraw(ticket.ticket_id)
    d.wait_event(Withdrawn(ticket.ticket_id))
    p.plane.push(ticket, [(index, index) for index in range(40)])
    p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == 40)
    assert (d.pool == 0xEE).all()
    assert d.plane.stats().blocks_refused
    p.plane.finish_push(ticket.ticket_id)


def test_an_offer_that_is_never_answered_ends_by_force(nodes, monkeypatch):
    p, d = pair(nodes)
    move(p, d, [5])
    monkeypatch.setattr(d.plane._roads["ucx"]._intake, "_answer", lambda *_args, **_named: None)
    ticket = d.grant([0, 1])
    p.plane.push(ticket, [(0, 0), (1, 1)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0, 1})
    p.plane.cancel_push(ticket.ticket_id)
    p.plane.tick(time.monotonic() + 2 * DRAIN_S)
    assert p.wait_kind(PushEnded, ticket.ticket_id).blocks_sent == 0
    with pytest.raises(TicketError):
        p.plane.push(ticket, [(0, 0)])
    monkeypatch.undo()
    d.plane.withdraw(ticket.ticket_id)
    move(p, d, [9])


def test_answers_of_others_and_late_ones_change_nothing(nodes):
    p, d = pair(nodes)
    move(p, d, [5])
    (link,) = p.plane._roads["ucx"]._sender._links.values()
    for peer in (link.peer, link.peer._replace(epoch=9)):
        for settled in (True, False):
            link.answered(Answer(peer, 1, settled))
    assert link._offers.wanted
    assert not link._again
    move(p, d, list(range(20)))


def test_replies_are_proven(nodes):
    p, d = pair(nodes)
    q = nodes(MAPPED, "Q", secret=b"another")
    ours, theirs = p.plane._context, d.plane._context
    good = ucx_wire.answer(theirs, ours.me, 7, settled=True)
    assert ucx_wire.read_reply(ours, good) == Answer(theirs.me, 7, True)
    assert ucx_wire.read_reply(ours, ucx_wire.farewell(theirs, ours.me, b"w" * 40)) == Gone(b"w" * 32)
    flipped = [bytes(b ^ (i == place) for i, b in enumerate(good)) for place in range(len(good))]
    for bad in (*flipped, good[:-1], b"", ucx_wire.answer(q.plane._context, ours.me, 7, settled=True)):
        assert ucx_wire.read_reply(ours, bad) is None
    assert ucx_wire.read_reply(theirs, good) is None, "it was not for them"


def test_an_offer_is_proven_with_all_it_says(nodes):
    p, d = pair(nodes)
    ours, theirs = p.plane._context, d.plane._context
    blocks = [ucx_wire.IntroducedBlock(3, 77, 5)]
    good = ucx_wire.introduce(ours, 12, theirs.me, b"reply", blocks, 8)
    said = ucx_wire.read_introduction(theirs, 12, good)
    assert said is not None
    assert (said.peer, said.blocks, said.memory, said.offer) == (ours.me, tuple(blocks), p.memory.name, 8)
    for place in range(len(good)):
        bad = bytes(b ^ (i == place) for i, b in enumerate(good))
        assert ucx_wire.read_introduction(theirs, 12, bad) is None
    assert ucx_wire.read_introduction(theirs, 13, good) is None


def test_an_offer_is_a_few_blocks(nodes, monkeypatch):
    """So that the receiver's thread comes back to others."""
    offered = []
    say = ucx_outbound.Link._say

    def watched(self, push, items, *rest):
        offered.append(len(items))
        say(self, push, items, *rest)

    monkeypatch.setattr(ucx_outbound.Link, "_say", watched)
    p, d = pair(nodes, block_bytes=3 << 20, num_blocks=32)
    move(p, d, list(range(32)))
    assert sum(offered) == 32
    assert max(offered) * (3 << 20) <= MAX_OFFER_BYTES


def test_a_receiver_that_dies_with_an_offer(nodes):
    p = nodes(MAPPED, "P", seed=1, num_blocks=64, block_bytes=BLOCK_BYTES)
    with remote("ucx", "D", num_blocks=64, block_bytes=BLOCK_BYTES) as d:
        ticket = decode_ticket(d.call("grant", list(range(64))))
        p.plane.push(ticket, [(0, 0)])
        p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})
        d.process.kill()
        d.process.join()
        p.plane.push(ticket, [(index, index) for index in range(1, 64)])
        p.wait_kind(PushFailed, ticket.ticket_id)
        assert p.plane.stats().open_pushes == 0
