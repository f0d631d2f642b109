"""Offers that are wrong, late or lost, and peers that go away with one: nothing is lost, nothing wrong arrives."""

from __future__ import annotations

import time

import pytest
from kv_harness import MAPPED, UNREADABLE, remote
from offers_harness import BLOCK_BYTES, mapped_peers, move, pair, wait_for_links

from kvtransfer import ucx_outbound, ucx_wire
from kvtransfer.errors import TicketError
from kvtransfer.events import PushEnded, PushFailed, ReceiveFailed
from kvtransfer.session import DRAIN_S
from kvtransfer.ticket import decode_ticket, encode_ticket
from kvtransfer.ucx_offers import PeerMemories
from kvtransfer.ucx_senders import Senders
from kvtransfer.ucx_wire import NO_SOURCE, Answer, Gone


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


def test_an_offer_that_is_never_answered_ends_by_force(nodes, monkeypatch):
    p, d = pair(nodes)
    move(p, d, [5])
    monkeypatch.setattr(Senders, "answer", lambda *_: None)
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


def test_answers_of_others_and_late_ones_change_nothing(nodes, monkeypatch):
    p, d = pair(nodes)
    move(p, d, [5])
    (link,) = p.plane._roads["ucx"]._sender._links.values()
    monkeypatch.setattr(Senders, "answer", lambda *_: None)
    ticket = d.grant([0], sender=p)
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    p.wait_for(lambda: link._offers.num_blocks == 1)
    (number,) = link._offers._open
    for outcome in ("copied", "unwanted", "unreadable"):
        link.answered(Answer(link.peer._replace(epoch=9), number, outcome))
        link.answered(Answer(link.peer, number - 1, outcome))
    p.seen += p.plane.poll()
    assert p.sent(ticket.ticket_id) == set()
    assert link._offers.possible
    link.answered(Answer(link.peer, number, "copied"))
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})


def test_replies_are_proven(nodes):
    p, d = pair(nodes)
    q = nodes(MAPPED, "Q", secret=b"another")
    ours, theirs = p.plane._context, d.plane._context
    good = ucx_wire.answer(theirs, ours.me, 7, "copied")
    assert ucx_wire.read_reply(ours, good) == Answer(theirs.me, 7, "copied")
    assert ucx_wire.read_reply(ours, ucx_wire.farewell(theirs, ours.me, b"w" * 40)) == Gone(b"w" * 32)
    flipped = [bytes(b ^ (i == place) for i, b in enumerate(good)) for place in range(len(good))]
    for bad in (*flipped, good[:-1], b"", ucx_wire.answer(q.plane._context, ours.me, 7, "copied")):
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


def test_blocks_offered_in_vain_come_back_when_the_link_fails(nodes, monkeypatch):
    p, d = pair(nodes, UNREADABLE)
    ticket = d.grant(range(4), sender=p)
    answered = ucx_outbound.Link.answered

    def full(self, answer):
        monkeypatch.setattr(ucx_outbound.Link, "_room", lambda self: 0)
        answered(self, answer)

    monkeypatch.setattr(ucx_outbound.Link, "answered", full)
    p.plane.push(ticket, [(index, index) for index in range(4)])
    (push,) = p.plane._context.sends.all_pushes()
    (link,) = wait_for_links(p)
    p.wait_for(lambda: link._again)
    assert len(push.posted) == 4
    p.plane.peer_dead(d.id, d.epoch)
    p.wait_kind(PushFailed, ticket.ticket_id)
    assert p.plane.stats().open_pushes == 0


def test_a_dead_peers_pool_is_let_go(nodes):
    p, d = pair(nodes)
    move(p, d, [5])
    assert mapped_peers(d) == {"P"}
    d.plane.peer_dead(p.id, p.epoch)
    d.wait_for(lambda: not mapped_peers(d))


def test_the_pool_of_a_peer_that_went_away_is_let_go(nodes):
    d = nodes("ucx", "D", num_blocks=8, block_bytes=BLOCK_BYTES)
    with remote(MAPPED, "P", num_blocks=8, block_bytes=BLOCK_BYTES, seed=1) as p:
        ticket = d.grant([0, 1])
        p.call("push", encode_ticket(ticket), [(0, 0), (1, 1)])
        d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0, 1})
        p.call("wait_sent", ticket.ticket_id, 2)
        assert mapped_peers(d) == {"P"}
        d.plane.complete(ticket.ticket_id)
        p.process.kill()
        p.process.join()
        d.wait_for(lambda: not mapped_peers(d))


def test_who_requires_tcp_copies_nothing(nodes):
    p = nodes(MAPPED, "P", seed=1, num_blocks=8, block_bytes=BLOCK_BYTES)
    d = nodes("ucx", "D", num_blocks=8, block_bytes=BLOCK_BYTES, require="tcp")
    ticket = d.grant([0, 1], sender=p)
    p.plane.push(ticket, [(0, 0), (1, 1)])
    assert "tcp is required" in d.wait_kind(ReceiveFailed, ticket.ticket_id).reason
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0, 1})
    assert not d.pool.any()
    assert mapped_peers(d) == set()
    d.plane.withdraw(ticket.ticket_id)


def test_another_pool_of_the_same_peer_is_mapped_anew(nodes):
    d = nodes("ucx", "D", digest="off", block_bytes=BLOCK_BYTES)
    for seed in (1, 2):
        p = nodes(MAPPED, "P", seed=seed, digest="off", block_bytes=BLOCK_BYTES)
        move(p, d, [5, 6])
        p.close()


def test_an_offer_nobody_can_answer_fails_its_ticket(nodes, monkeypatch):
    p, d = pair(nodes)
    monkeypatch.setattr(Senders, "meet", lambda *_: False)
    ticket = d.grant([0, 1])
    p.plane.push(ticket, [(0, 0), (1, 1)])
    failed = d.wait_kind(ReceiveFailed, ticket.ticket_id)
    assert failed.reason == "an offer came that cannot be answered"
    assert not d.pool.any()
    d.plane.withdraw(ticket.ticket_id)
