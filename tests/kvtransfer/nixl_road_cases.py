"""The NIXL road's own cases; `test_kv_nixl` runs them in a process without UCXX."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness import DEADLINE_S, FINGERPRINT, SECRET, Node

from kvtransfer import nixl_wire as wire
from kvtransfer.errors import PeerUnreachableError
from kvtransfer.events import PushFailed, Withdrawn
from kvtransfer.layout import WIRE_VERSION, BlockLayout
from kvtransfer.regroup import TokenRun
from kvtransfer.routes import Route
from kvtransfer.tcp_wire import Transcript, WireError, parse_address
from kvtransfer.ticket import PeerId


class Stranger:
    """A sender that says what it likes."""

    def __init__(self, d: Node) -> None:
        self.sock = socket.create_connection(parse_address(d.plane.hello().addresses["nixl"]), DEADLINE_S)
        self.sock.settimeout(DEADLINE_S)
        self._frames = wire.Frames(to_sender=True)
        self._got: list[object] = []

    def say(self, *messages: object) -> None:
        self.sock.sendall(b"".join(wire.frame(message) for message in messages))

    def hear(self) -> object:
        while not self._got:
            data = self.sock.recv(65536)
            if not data:
                return None
            self._got += self._frames.feed(data)
        return self._got.pop(0)

    def is_shut_out(self) -> bool:
        try:
            return self.hear() is None
        except ConnectionResetError:
            return True

    def shake_hands(self, secret: bytes | None = SECRET) -> None:
        challenge, mine, me = self.hear(), b"n" * 32, PeerId("P", 1)
        transcript = Transcript(challenge.nonce, mine, me, PeerId("D", 1), FINGERPRINT)
        self.say(wire.Reply("P", 1, mine, transcript.mac(wire.SENDER_ROLE, secret)))


@pytest.fixture
def d(nodes) -> Node:
    return nodes("nixl", "D")


@pytest.fixture
def stranger(d):
    made: list[Stranger] = []

    def make() -> Stranger:
        made.append(Stranger(d))
        return made[-1]

    yield make
    for each in made:
        each.sock.close()


def carry(p: Node, d: Node) -> None:
    ticket = d.grant([3])
    p.plane.push(ticket, [(0, 1)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[3], p.pool[1])
    d.plane.complete(ticket.ticket_id)


def test_only_who_knows_the_secret_learns_where_the_pool_is(nodes, d, stranger):
    one = stranger()
    one.shake_hands(secret=b"guessed")
    assert one.is_shut_out()
    p = nodes("nixl", "P", seed=1, secret=b"another")
    ticket = d.grant([0])
    p.plane.push(ticket, [(0, 0)])
    p.wait_kind(PushFailed, ticket.ticket_id)
    assert not d.pool.any()


@pytest.mark.parametrize(
    "messages",
    [
        [wire.Ask(1, (wire.Wish(0, 7, 0),))],
        [wire.Landed(1, (0,))],
        [wire.Stop(1)],
        [wire.Challenge(WIRE_VERSION, b"n" * 32)],
    ],
    ids=lambda messages: type(messages[0]).__name__,
)
def test_out_of_turn(nodes, d, stranger, messages):
    one = stranger()
    assert isinstance(one.hear(), wire.Challenge)
    one.say(*messages)
    assert one.is_shut_out()
    carry(nodes("nixl", "P", seed=1), d)


def test_a_block_is_allowed_once_and_reported_once(d, stranger):
    ticket = d.grant([3, 4], sender=("P", 1))
    sender = stranger()
    sender.shake_hands()
    assert isinstance(sender.hear(), wire.Welcome)
    wishes = (wire.Wish(0, 7, 0), wire.Wish(1, 6, 0), wire.Wish(2, 7, 0), wire.Wish(0, 7, 0))
    sender.say(wire.Ask(ticket.ticket_id, wishes))
    # Another life of the block, no such block, and one that is allowed already.
    assert sender.hear() == wire.Allow(ticket.ticket_id, (0,), (1, 2, 0))
    # What was allowed may be landing: the ticket is not withdrawn before its sender has answered.
    d.plane.withdraw(ticket.ticket_id)
    assert sender.hear() == wire.Stop(ticket.ticket_id)
    assert Withdrawn(ticket.ticket_id) not in d.plane.poll()
    sender.say(wire.Released(ticket.ticket_id, (0,)))
    d.wait_event(Withdrawn(ticket.ticket_id))
    sender.say(wire.Landed(ticket.ticket_id, (0,)))
    assert sender.is_shut_out()


def test_a_sender_that_goes_away_leaves_nothing_claimed(d, stranger):
    ticket = d.grant([3], sender=("P", 1))
    sender = stranger()
    sender.shake_hands()
    sender.hear()
    sender.say(wire.Ask(ticket.ticket_id, (wire.Wish(0, 7, 0),)))
    assert sender.hear() == wire.Allow(ticket.ticket_id, (0,), ())
    d.plane.withdraw(ticket.ticket_id)
    sender.sock.close()
    d.wait_event(Withdrawn(ticket.ticket_id))


def test_a_cancelled_push_lets_go_of_what_it_was_allowed(nodes, d):
    """The receiver need not withdraw: another sender may take over."""
    p, q = nodes("nixl", "P", seed=1), nodes("nixl", "Q", seed=2)
    ticket = d.grant(range(16))
    p.plane.push(ticket, [(index, index) for index in range(16)])
    p.plane.cancel_push(ticket.ticket_id)
    carry(p, nodes("nixl", "E"))
    d.plane.withdraw(ticket.ticket_id)
    d.wait_event(Withdrawn(ticket.ticket_id))
    carry(q, d)


def test_an_idle_road_asks_for_no_attention(nodes, d):
    p = nodes("nixl", "P", seed=1)
    carry(p, d)
    roads = [node.plane._roads["nixl"] for node in (p, d)]
    p.wait_for(lambda: p.plane.stats().open_pushes == 1 and all(road._timeout_s() is None for road in roads))


def test_it_says_what_it_is(nodes, d):
    p = nodes("nixl", "P", seed=1)
    carry(p, d)
    assert p.plane.stats().routes == (Route(PeerId("D", 1), "sending", "nixl", "tcp"),)
    assert d.plane.stats().routes == (Route(PeerId("P", 1), "receiving", "nixl", "tcp"),)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=4), st.booleans())
def test_bytes_from_strangers_are_messages_or_an_error(parts, to_sender):
    frames = wire.Frames(to_sender=to_sender)
    for part in parts:
        try:
            frames.feed(part)
        except WireError:
            return


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20])
def test_frames_may_come_in_pieces(cut):
    message = wire.Ask(5, (wire.Wish(1, 2, 3), wire.Wish(4, 5, (1 << 64) - 1)))
    data = wire.frame(message) * 2
    frames = wire.Frames(to_sender=False)
    found = [each for start in range(0, len(data), cut) for each in frames.feed(data[start : start + cut])]
    assert found == [message, message]


def test_blocks_of_another_size_go_over_tcp_and_without_it_the_peer_is_refused(nodes):
    """NIXL writes from registered memory only: it cannot send what was put together elsewhere."""
    ours = BlockLayout("float32", 4, num_layers=2, num_kv_heads=1, head_dim=8)
    theirs = BlockLayout("float32", 6, num_layers=2, num_kv_heads=1, head_dim=8)
    run = [(0, TokenRun((0, 1), 0, 6))]
    p, d = nodes(["nixl", "tcp"], "P", layout=ours, seed=1), nodes(["nixl", "tcp"], "D", layout=theirs)
    ticket = d.grant([3])
    p.plane.push(ticket, run)
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert {route.scheme for route in p.plane.stats().routes} == {"tcp"}
    d.plane.complete(ticket.ticket_id)
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})
    p.plane.finish_push(ticket.ticket_id)
    alone, other = nodes("nixl", "P2", layout=ours), nodes("nixl", "D2", layout=theirs)
    ticket = other.grant([3])
    with pytest.raises(PeerUnreachableError, match="another size"):
        alone.plane.push(ticket, run)
    assert "another size" in alone.plane.refused()[PeerId("D2", 1)]
    other.plane.withdraw(ticket.ticket_id)
