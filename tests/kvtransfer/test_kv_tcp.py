"""The TCP road against strangers: whoever talks nonsense loses that connection, and nobody else anything."""

from __future__ import annotations

import socket
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness import DEADLINE_S, FINGERPRINT, SECRET, Node

from kvtransfer import tcp_wire as wire
from kvtransfer.digest import BlockIdentity, block_digest
from kvtransfer.errors import HelloError
from kvtransfer.events import PeerLost, PushFailed, Withdrawn
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.tcp_outbound import Outbound
from kvtransfer.ticket import PeerId


@pytest.fixture
def d(nodes) -> Node:
    return nodes("tcp", "D")


def connect(d: Node) -> socket.socket:
    sock = socket.create_connection(wire.parse_address(d.plane.hello().addresses["tcp"]), DEADLINE_S)
    sock.settimeout(DEADLINE_S)
    return sock


def read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            break
        data += part
    return data


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def shake_hands(d: Node, *, secret: bytes | None = SECRET, epoch: int = 1) -> socket.socket:
    sock = connect(d)
    theirs = wire.parse_greeting(read(sock, wire.GREETING_BYTES))
    me, mine = PeerId("P", epoch), b"n" * 32
    transcript = wire.Transcript(theirs, mine, me, PeerId("D", 1), FINGERPRINT)
    sock.sendall(wire.pack_reply(me, mine, transcript.mac(b"sender", secret)))
    return sock


def proven(d: Node) -> socket.socket:
    sock = shake_hands(d)
    assert len(read(sock, wire.GREETING_BYTES)) == wire.GREETING_BYTES
    return sock


def still_works(d: Node, nodes) -> None:
    p = nodes("tcp", "Q", seed=1)
    ticket = d.grant([9])
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[9], p.pool[0])
    assert not d.pool[:9].any()
    d.plane.complete(ticket.ticket_id)


@pytest.mark.parametrize("secret", [b"another", b"", None])
def test_a_wrong_secret_is_refused(d, nodes, secret):
    with shake_hands(d, secret=secret) as sock:
        assert is_closed(sock)
    p = nodes("tcp", "P", secret=secret)
    ticket = d.grant([0])
    p.plane.push(ticket, [(0, 0)])
    p.wait_kind(PushFailed, ticket.ticket_id)
    assert d.plane.stats().blocks_received == 0
    still_works(d, nodes)


def test_a_receiver_without_the_secret_gets_no_block(nodes):
    p, d = nodes("tcp", "P"), nodes("tcp", "D", secret=None)
    ticket = d.grant([0])
    p.plane.push(ticket, [(0, 0)])
    p.wait_kind(PushFailed, ticket.ticket_id)
    assert (p.plane.stats().blocks_sent, d.plane.stats().blocks_received) == (0, 0)


def test_a_dead_life_of_a_peer_may_not_come_back(d):
    d.plane.peer_dead("P", 1)
    with shake_hands(d, epoch=1) as sock:
        assert is_closed(sock)
    with shake_hands(d, epoch=2) as sock:
        assert len(read(sock, wire.GREETING_BYTES)) == wire.GREETING_BYTES


def test_a_handshake_cannot_be_replayed(d):
    with connect(d) as first, connect(d) as second:
        theirs = wire.parse_greeting(read(first, wire.GREETING_BYTES))
        me, mine = PeerId("P", 1), b"n" * 32
        transcript = wire.Transcript(theirs, mine, me, PeerId("D", 1), FINGERPRINT)
        reply = wire.pack_reply(me, mine, transcript.mac(b"sender", SECRET))
        read(second, wire.GREETING_BYTES)
        second.sendall(reply)
        assert is_closed(second)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200,
        b"\0" * 500,
        struct.pack(">4sBxHQ32s32s", wire.MAGIC, WIRE_VERSION, 65535, 1, b"", b"") + b"x" * 500,
        struct.pack(">4sBxHQ32s32s", wire.MAGIC, WIRE_VERSION, 0, 1, b"", b"") + b"x" * 500,
        struct.pack(">4sBxHQ32s32s", wire.MAGIC, WIRE_VERSION, 4, 1, b"", b"") + b"\xff\xff\xff\xff",
        struct.pack(">4sBxHQ32s32s", wire.MAGIC, 9, 4, 1, b"", b"") + b"abcd",
    ],
)
def test_nonsense_instead_of_a_handshake(d, nodes, data):
    with connect(d) as sock:
        read(sock, wire.GREETING_BYTES)
        sock.sendall(data)
        assert is_closed(sock)
    still_works(d, nodes)


@pytest.mark.parametrize("length", [0, 4095, 4097, (1 << 64) - 1])
def test_a_length_that_is_no_block_closes_the_connection(d, nodes, length):
    ticket = d.grant([0])
    with proven(d) as sock:
        sock.sendall(wire.pack_header(wire.Header(ticket.ticket_id, 0, 7, length, 0)) + b"x" * 100)
        assert is_closed(sock)
    still_works(d, nodes)


def test_a_truncated_block_does_not_arrive_and_can_be_sent_again(d, nodes):
    ticket = d.grant([0])
    with proven(d) as sock:
        sock.sendall(wire.pack_header(wire.Header(ticket.ticket_id, 0, 7, 4096, 0)) + b"x" * 100)
    d.wait_for(lambda: any(getattr(event, "reason", "") for event in d.seen))
    p = nodes("tcp", "P2", seed=3)
    p.plane.push(ticket, [(0, 5)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[0], p.pool[5])


def test_a_connection_that_breaks_while_a_push_begins_costs_that_push_alone(d, nodes, monkeypatch):
    p, ticket = nodes("tcp", "P", seed=1), d.grant([3])

    def broken(_link: Outbound, _push: object) -> None:
        raise ConnectionResetError("gone this moment")

    with monkeypatch.context() as patch:
        patch.setattr(Outbound, "add", broken)
        p.plane.push(ticket, [(0, 0)])
        failed = p.wait_kind(PushFailed, ticket.ticket_id)
    assert "gone this moment" in failed.reason
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[3], p.pool[0])
    d.plane.complete(ticket.ticket_id)


def test_no_byte_on_the_wire_can_be_flipped(d):
    payload = bytes(range(256)) * 16
    positions = [*range(wire.HEADER_BYTES), *range(wire.HEADER_BYTES, wire.HEADER_BYTES + 4096, 331)]
    for number, position in enumerate(positions):
        ticket = d.grant([0])
        digest = block_digest(np.frombuffer(payload, np.uint8), BlockIdentity(ticket.ticket_id, 0, 7), "full")
        frame = bytearray(wire.pack_header(wire.Header(ticket.ticket_id, 0, 7, 4096, digest)) + payload)
        frame[position] ^= 1
        with proven(d) as sock:
            sock.sendall(frame)
        d.wait_for(lambda number=number: d.seen.count(PeerLost("P", 1)) == number + 1)
        assert not d.arrived(ticket.ticket_id), position
        d.plane.withdraw(ticket.ticket_id)
        d.wait_event(Withdrawn(ticket.ticket_id))
    assert d.plane.stats().blocks_received == 0


def test_strangers_cannot_keep_peers_out(d, nodes):
    strangers = [connect(d) for _ in range(100)]
    still_works(d, nodes)
    for sock in strangers:
        sock.close()
    d.wait_for(lambda: d.plane.stats().connections <= 1)


def test_random_bytes_after_the_handshake(d, nodes):
    @settings(max_examples=30, deadline=None)
    @given(st.binary(min_size=wire.HEADER_BYTES, max_size=200))
    def attack(noise: bytes) -> None:
        with proven(d) as sock:
            sock.sendall(noise)
            assert is_closed(sock)

    attack()
    still_works(d, nodes)


@pytest.mark.parametrize(
    "address",
    [b"", b"localhost:80", b"127.0.0.1", b"127.0.0.1:0", b"127.0.0.1:70000", b"0.0.0.0:5", b"\xff:5", b"a" * 999],
)
def test_bad_addresses(address):
    with pytest.raises(HelloError):
        wire.parse_address(address)


def test_addresses_round_trip():
    for host in ("10.1.2.3", "::1"):
        assert wire.parse_address(wire.format_address(host, 5000)) == (host, 5000)
