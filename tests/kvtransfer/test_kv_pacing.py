"""Connections within the host are taken off a pacing congestion control, and no others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer import pacing
from kvtransfer.pacing import unpace, unpace_all

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A control that this kernel lets us choose and that counts as a pacing one."""
    allowed = AVAILABLE.read_text().split() if AVAILABLE.exists() else []
    others = [name for name in allowed if name != "reno"]
    if not others:
        pytest.skip("this kernel offers reno alone")
    name = next((name for name in others if name == "bbr"), others[0]).encode()
    monkeypatch.setattr(pacing, "_PACED", name)
    return name


def connected(source: str = "127.0.0.1") -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), source_address=(source, 0))
        theirs, _ = listener.accept()
    return ours, theirs


@pytest.fixture
def pair(paced: bytes) -> Iterator[Pair]:
    ends = connected()
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, paced)
    yield ends
    for end in ends:
        end.close()


def control(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_one_connection_is_taken_off_it_once(pair: Pair, paced: bytes) -> None:
    assert unpace(pair[0])
    assert control(pair[0]) == "reno"
    assert not unpace(pair[0])
    assert control(pair[1]) == paced.decode()


def test_those_that_libraries_hold_are_found_and_go_on_working(pair: Pair) -> None:
    assert unpace_all() >= 2
    assert [control(end) for end in pair] == ["reno", "reno"]
    pair[0].sendall(b"on")
    assert pair[1].recv(2) == b"on"


def test_a_connection_between_two_addresses_keeps_what_it_has(paced: bytes) -> None:
    ours, theirs = connected(source="127.0.0.2")
    with ours, theirs:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, paced)
        assert not unpace(ours)
        assert control(ours) == paced.decode()


def test_a_control_that_does_not_pace_is_left_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    before = control(pair[0])
    monkeypatch.setattr(pacing, "_PACED", b"something else")
    assert not unpace(pair[0])
    assert control(pair[0]) == before


def test_what_is_no_connection_is_left_alone() -> None:
    one, other = socket.socketpair()
    closed = socket.socket()
    closed.close()
    with one, other, socket.socket() as unconnected, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        assert not any(unpace(sock) for sock in (one, unconnected, datagrams, closed))
