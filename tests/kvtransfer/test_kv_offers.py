"""Blocks that the receiver copies out of the sender's pool: when it does, when not, how much at a time."""

from __future__ import annotations

import threading

import pytest
from kv_harness import MAPPED, UNREADABLE, remote
from offers_harness import BLOCK_BYTES, lanes, move, pair, wait_for_links, watch_sends

from kvtransfer import ucx_inbound, ucx_outbound
from kvtransfer.events import PushEnded, Withdrawn
from kvtransfer.layout import BlockLayout
from kvtransfer.regroup import run_of
from kvtransfer.ticket import decode_ticket
from kvtransfer.ucx_inbound import Intake
from kvtransfer.ucx_offers import MAX_OFFER_BYTES, MAX_OFFERED_BYTES


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


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("scheme", [MAPPED, UNREADABLE])
def test_nobody_reads_for_a_withdrawn_ticket(nodes, scheme, met):
    p, d = pair(nodes, scheme)
    if met:
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
    d.pool[:] = 0
    move(p, d, [6])
    assert ("mapped" in lanes(p) + lanes(d)) == (scheme == MAPPED)


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


def test_a_cancelled_push_sends_nothing_that_was_offered_in_vain(nodes, monkeypatch):
    sent = watch_sends(monkeypatch)
    p, d = pair(nodes, UNREADABLE)
    hold = threading.Event()
    turn = Intake.turn
    monkeypatch.setattr(Intake, "turn", lambda self: hold.is_set() and turn(self))
    ticket = d.grant(range(40), sender=p)
    p.plane.push(ticket, [(index, index) for index in range(40)])
    (push,) = p.plane._context.sends.all_pushes()
    p.wait_for(lambda: push.posted)
    p.plane.cancel_push(ticket.ticket_id)
    hold.set()
    d.plane._roads["ucx"]._post(lambda: None)
    assert p.wait_kind(PushEnded, ticket.ticket_id).blocks_sent == 0
    assert sent == []
    d.plane.withdraw(ticket.ticket_id, blocks_sent=0)
    d.wait_event(Withdrawn(ticket.ticket_id))
    monkeypatch.undo()
    move(p, d, [9])


def test_tokens_cut_for_another_block_size_are_not_offered(nodes, monkeypatch):
    sent = watch_sends(monkeypatch)
    ours, theirs = (BlockLayout("float32", size, 2, 1, 64) for size in (16, 24))
    p, d = nodes(MAPPED, "P", seed=1, layout=ours), nodes(MAPPED, "D", layout=theirs)
    ticket = d.grant([6])
    p.plane.push(ticket, [(0, run_of([4, 1], 0, 24, 16))])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert sent == [0]
    (link,) = wait_for_links(p)
    assert not link._offers.possible, "it would have the larger window"
    d.plane.complete(ticket.ticket_id)


@pytest.mark.parametrize("scheme", [MAPPED, UNREADABLE])
def test_a_turn_that_ends_early_goes_on(nodes, monkeypatch, scheme):
    """What has been taken out of UCX's hands wakes nobody."""
    monkeypatch.setattr(ucx_inbound, "_TURN_S", -1.0)
    p, d = pair(nodes, scheme)
    for _ in range(3):
        move(p, d, list(range(64)))
        d.pool[:] = 0
