"""The control plane over real sockets: who may speak, and what happens to what nobody should have sent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from cluster import channel as channel_module
from cluster.channel import Channel, ChannelError, _curve_keys
from cluster.config import ClusterConfig, new_epoch
from cluster.envelope import MAX_FRAME_BYTES, Envelope, encode
from cluster.request import RequestId, RequestKey
from cluster.wire import Failed, Party, Ping
from tests.cluster.redis_server import eventually

SECRET = b"0123456789abcdef"
LIMIT_S = 20.0
HANDSHAKE_ENDS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


def config(name: str, secret: bytes | None = None, bind: str = "127.0.0.1", advertise: str = "") -> ClusterConfig:
    return ClusterConfig(name, new_epoch(), "redis://unused", bind, advertise or bind, secret)


async def next_sequence(inbox: Channel) -> int:
    async with asyncio.timeout(LIMIT_S):
        body = (await inbox.receive()).body
    assert isinstance(body, Ping)
    return body.sequence


@pytest.fixture
def outsider() -> Iterator[zmq.Socket[bytes]]:
    """A PUSH socket that belongs to nobody."""
    context = zmq.Context()
    yield context.socket(zmq.PUSH)
    context.destroy(linger=0)  # its monitors too


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "curve"])
async def test_messages_arrive_in_order_and_name_their_sender(secret: bytes | None) -> None:
    async with Channel(config("a", secret)) as a, Channel(config("b", secret)) as b:
        for sequence in range(200):
            a.send(b.party, Ping(sequence))
        async with asyncio.timeout(LIMIT_S):
            got = [await b.receive() for _ in range(200)]
        assert [envelope.body for envelope in got] == [Ping(sequence) for sequence in range(200)]
        assert {envelope.sender for envelope in got} == {a.party}
        b.send(got[0].sender, Ping(7))
        assert await next_sequence(a) == 7
        assert b.num_dropped == 0


async def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with Channel(config("a", bind="::1")) as a, Channel(config("b", bind="::1")) as b:
        assert b.party.address.startswith("tcp://[::1]:")
        a.send(b.party, Ping(1))
        assert await next_sequence(b) == 1


async def test_a_message_for_another_life_is_dropped() -> None:
    async with Channel(config("a")) as a, Channel(config("b")) as b:
        earlier = Party(b.party.id, b.party.epoch ^ 1, b.party.address)
        a.send(earlier, Ping(1))
        while not b.num_dropped:
            a.send(b.party, Ping(2))
            assert await next_sequence(b) == 2
        assert b.num_dropped == 1


async def _handshake(push: zmq.Socket[bytes], address: str) -> int:
    """Connect and return how the first handshake ended."""
    monitor = push.get_monitor_socket(HANDSHAKE_ENDS)
    push.connect(address)
    await eventually(lambda: monitor.poll(0))  # the other end may need this loop to admit us
    return int(recv_monitor_message(monitor)["event"])


@pytest.mark.parametrize("kind", ["none", "other secret", "own client key"])
async def test_without_the_secret_no_message_is_taken(kind: str, outsider: zmq.Socket[bytes]) -> None:
    async with Channel(config("a", SECRET)) as a, Channel(config("b", SECRET)) as b:
        ours, theirs = _curve_keys(SECRET), _curve_keys(b"another secret, just as long")
        if kind == "other secret":
            outsider.curve_publickey, outsider.curve_secretkey = theirs
            outsider.curve_serverkey = theirs[0]
        elif kind == "own client key":
            outsider.curve_publickey, outsider.curve_secretkey = zmq.curve_keypair()
            outsider.curve_serverkey = ours[0]
        assert await _handshake(outsider, b.party.address) != zmq.EVENT_HANDSHAKE_SUCCEEDED
        with contextlib.suppress(zmq.Again):  # no connection, no queue
            outsider.send(encode(Envelope(a.party, b.party.epoch, Ping(66))), zmq.NOBLOCK)
        a.send(b.party, Ping(1))
        assert await next_sequence(b) == 1


async def test_the_monitor_sees_a_handshake_that_is_right(outsider: zmq.Socket[bytes]) -> None:
    """What the test above relies on."""
    async with Channel(config("b", SECRET)) as b:
        outsider.curve_publickey, outsider.curve_secretkey = _curve_keys(SECRET)
        outsider.curve_serverkey = _curve_keys(SECRET)[0]
        assert await _handshake(outsider, b.party.address) == zmq.EVENT_HANDSHAKE_SUCCEEDED


async def test_a_plain_node_does_not_hear_a_secret_one() -> None:
    async with Channel(config("a", SECRET)) as a, Channel(config("b")) as b, Channel(config("c")) as c:
        a.send(b.party, Ping(66))
        c.send(b.party, Ping(1))
        assert await next_sequence(b) == 1


async def test_what_is_no_message_is_counted_and_dropped(outsider: zmq.Socket[bytes]) -> None:
    async with Channel(config("a")) as a, Channel(config("b")) as b:
        good = encode(Envelope(a.party, b.party.epoch, Ping(1)))
        outsider.connect(b.party.address)
        for frame in (b"", b"\x01", b"\x80\x04\x95", b"\xff" + good[1:], good[:-1], good + b"\x00"):
            outsider.send(frame)
        outsider.send_multipart([good, good])
        outsider.send(good)
        assert await next_sequence(b) == 1
        assert b.num_dropped == 7


async def test_an_oversize_frame_ends_its_connection_only(outsider: zmq.Socket[bytes]) -> None:
    async with Channel(config("a")) as a, Channel(config("b")) as b:
        monitor = outsider.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        outsider.connect(b.party.address)
        outsider.send(b"\x01" * (MAX_FRAME_BYTES + 1), copy=False)
        await eventually(lambda: monitor.poll(0))
        a.send(b.party, Ping(1))
        assert await next_sequence(b) == 1


def _send_many(channel: Channel, peer: Party, count: int) -> None:
    for sequence in range(count):
        channel.send(peer, Ping(sequence))


async def test_what_cannot_be_sent_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "SEND_QUEUE_FRAMES", 2)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        deaf = Party("deaf", 1, f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
        async with Channel(config("a")) as a:
            with pytest.raises(ChannelError, match="cap"):
                a.send(deaf, Failed(RequestKey(RequestId("r"), 1), "x", "y" * MAX_FRAME_BYTES))
            with pytest.raises(ChannelError, match="full"):
                _send_many(a, deaf, 10_000)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:99999", "tcp://192.0.2.1:80", "nonsense", "tcp://example:1"])
async def test_an_address_nobody_should_dial_is_refused(address: str) -> None:
    async with Channel(config("a")) as a:
        with pytest.raises(ChannelError):
            a.send(Party("x", 1, address), Ping(1))
        assert not a._peers


async def test_only_loopback_without_a_secret() -> None:
    with pytest.raises(ChannelError, match="secret"):
        Channel(config("a", bind="0.0.0.0"))


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "curve"])
async def test_an_address_that_cannot_be_bound(secret: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "is_loopback", lambda _host: True)
    with pytest.raises(ChannelError, match="bind"):
        async with Channel(config("a", secret, bind="192.0.2.1")):
            pass


async def test_a_closed_channel_says_so() -> None:
    unopened = Channel(config("a"))
    with pytest.raises(ChannelError):
        _ = unopened.party
    with pytest.raises(ChannelError):
        await unopened.receive()


async def test_old_peers_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_PEERS", 4)
    async with Channel(config("a")) as a, Channel(config("b")) as b:
        a.send(b.party, Ping(0))
        for epoch in range(20):
            a.send(Party("old", epoch, b.party.address), Ping(epoch))
            a.send(b.party, Ping(epoch))
        assert len(a._peers) == 4
        assert (b.party.address, b.party.epoch) in a._peers


async def test_a_forgotten_peer_still_hears_the_last_word() -> None:
    """PeerDown is the last message to a node that is given up; it may live and must then learn of it."""
    async with Channel(config("a")) as a, Channel(config("b")) as b:
        a.send(b.party, Ping(2))
        a.forget(b.party)
        a.forget(b.party)
        assert not a._peers
        assert await next_sequence(b) == 2


async def test_a_flood_leaves_the_loop_its_turns() -> None:
    async with Channel(config("a")) as a, Channel(config("b")) as b:
        inbox = b._inbox
        b._inbox = _Full(encode(Envelope(a.party, b.party.epoch, Ping(1))))  # type: ignore[assignment]
        rounds = 10
        receiving = asyncio.create_task(_receive(b, rounds * channel_module.MESSAGES_PER_TURN))
        turns = 0
        while not receiving.done():
            await asyncio.sleep(0)
            turns += 1
        b._inbox = inbox
        assert turns >= rounds


async def test_what_nobody_reads_yet_leaves_the_loop_at_rest() -> None:
    async with Channel(config("a")) as a, Channel(config("b")) as b:
        a.send(b.party, Ping(1))
        assert await next_sequence(b) == 1
        waiting = asyncio.create_task(b.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert b._watched is not None
        a.send(b.party, Ping(2))
        await eventually(lambda: b._watched is None)
        assert await next_sequence(b) == 2
        a.send(b.party, Ping(3))
        assert await next_sequence(b) == 3


class _Full:
    """An inbox in which there is always one more, as under a flood."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def recv(self, _flags: int, *, copy: bool) -> zmq.Frame:
        assert not copy
        return zmq.Frame(self._content)


async def _receive(channel: Channel, count: int) -> None:
    for _ in range(count):
        await channel.receive()


def _policies() -> list[int]:
    """How each thread of this process is scheduled."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.append(os.sched_getscheduler(int(task.name)))
    return found


async def test_background_io_changes_the_policy_of_its_own_threads_only() -> None:
    others = _policies().count(os.SCHED_BATCH)
    async with Channel(config("a")) as a, Channel(config("b"), background_io=True) as b:
        a.send(b.party, Ping(1))
        assert await next_sequence(b) == 1
        b.send(a.party, Ping(2))
        assert await next_sequence(a) == 2
        # A thread sets its own policy before all else that it does: b's has, since it has carried a message.
        assert _policies().count(os.SCHED_BATCH) > others
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_background_io_where_the_system_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    others = _policies().count(os.SCHED_BATCH)
    async with Channel(config("a")) as a, Channel(config("b"), background_io=True) as b:
        a.send(b.party, Ping(1))
        assert await next_sequence(b) == 1
        assert _policies().count(os.SCHED_BATCH) == others
