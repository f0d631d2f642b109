"""The control plane: typed messages between processes over ZeroMQ.

Every process binds one PULL socket and opens one PUSH socket per peer. Sending never blocks: if a peer's queue is
full the message is refused with :class:`ChannelError`. Delivery to a dead peer is silent, as on any network:
heartbeats (`router/registry.py`) decide life and death, and every exchange has a deadline.

With a shared secret all sockets speak CURVE: the secret yields the one key pair of this cluster, servers admit
that key only and clients know the server by it. Without a secret only loopback may be bound, and only loopback is
dialled: an address that Redis or a peer names may be anyone's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from hashlib import blake2b
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from cluster.config import ClusterConfig, is_loopback, url_host
from cluster.envelope import MAX_FRAME_BYTES, Envelope, WireError, decode, encode
from cluster.wire import Message, Party

log = logging.getLogger(__name__)

SEND_QUEUE_FRAMES = 10_000
LINGER_MS = 500
# More peers than any cluster has: what is beyond them are old lives, or somebody who invents senders.
MAX_PEERS = 512
# What has already arrived is handed out without going through the event loop; a flood must not own it.
MESSAGES_PER_TURN = 64
_ZAP_DOMAIN = "baton"


class ChannelError(Exception):
    """A message could not be handed to ZeroMQ, or the socket could not be bound."""


class Channel:
    """One process's end of the control plane. Owns its sockets and ZeroMQ context; use as ``async with``.

    With ``background_io`` ZeroMQ's thread waits for the event loop's to rest instead of interrupting it for each
    message that comes, where both share a CPU: a router's. Not for nodes: they compute on all CPUs, without rest.
    """

    def __init__(self, config: ClusterConfig, *, background_io: bool = False) -> None:
        if config.secret is None and not is_loopback(config.bind_host):
            raise ChannelError("a non-loopback bind needs the shared secret")
        self._config = config
        self._background_io = background_io
        self._context: zmq.asyncio.Context | None = None
        # Not zmq.asyncio's: its futures cost as much for a message as all that is done with it.
        self._inbox: zmq.Socket[bytes] | None = None
        self._watched: int | None = None  # the inbox's descriptor, while the event loop looks at it
        self._arrived: asyncio.Future[None] | None = None  # while somebody waits for a message
        # Least recently used first.
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._keys = _curve_keys(config.secret) if config.secret else None
        self._authenticator: AsyncioAuthenticator | None = None
        self._party: Party | None = None
        self._num_received = 0
        self.num_dropped = 0

    @property
    def party(self) -> Party:
        """This process as others address it; valid once the channel is open."""
        if self._party is None:
            raise ChannelError("the channel is not open yet")
        return self._party

    async def __aenter__(self) -> Channel:
        self._context = zmq.asyncio.Context()
        if self._background_io and _may_use_batch_policy():
            self._context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
        try:
            self._inbox = self._bind(self._context)
        except zmq.ZMQError as error:
            await self._close()
            raise ChannelError(f"cannot bind the control socket to {self._config.bind_host}: {error}") from error
        port = bytes(self._inbox.getsockopt(zmq.LAST_ENDPOINT)).rsplit(b":", 1)[1].rstrip(b"\0").decode()
        address = f"tcp://{url_host(self._config.advertise_host)}:{port}"
        self._party = Party(self._config.node_id, self._config.epoch, address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def send(self, peer: Party, message: Message) -> None:
        """Queue ``message`` for ``peer``; returns at once. Raises :class:`ChannelError` if that is not possible."""
        try:
            frame = encode(Envelope(self.party, peer.epoch, message))
            self._socket(peer).send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise ChannelError(f"the queue to {peer.id} is full") from None
        except (WireError, zmq.ZMQError) as error:
            raise ChannelError(f"cannot send to {peer.id}: {error}") from error

    async def receive(self) -> Envelope:
        """The next message meant for this life of this process; anything else is counted and dropped."""
        if self._inbox is None:
            raise ChannelError("the channel is not open yet")
        while True:
            self._num_received += 1
            if self._num_received % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
            try:
                frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await self._some_arrived(self._inbox)
                continue
            try:
                if frame.more:
                    self._inbox.recv_multipart()  # the rest of it is here already
                    raise WireError("several frames in one message")
                envelope = decode(frame.bytes)
                if envelope.to_epoch != self._config.epoch:
                    raise WireError("it is meant for another life of this process")
            except WireError as error:
                self._drop(error)
                continue
            return envelope

    def forget(self, peer: Party) -> None:
        """Close the socket to a peer that is given up. What is queued for it is still sent if it can be soon."""
        socket = self._peers.pop((peer.address, peer.epoch), None)
        if socket is not None:
            socket.close(linger=LINGER_MS)

    def _bind(self, context: zmq.asyncio.Context) -> zmq.Socket[bytes]:
        inbox: zmq.Socket[bytes] = zmq.Socket(context, zmq.PULL)
        try:
            inbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            inbox.setsockopt(zmq.LINGER, 0)
            inbox.setsockopt(zmq.IPV6, int(":" in self._config.bind_host))
            if self._keys is not None:
                self._authenticator = AsyncioAuthenticator(context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(_ZAP_DOMAIN, _OneKey(self._keys[0]))
                inbox.curve_publickey, inbox.curve_secretkey = self._keys
                inbox.curve_server = True
                inbox.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)  # with a domain nobody is admitted unasked
            inbox.bind(f"tcp://{url_host(self._config.bind_host)}:0")
        except zmq.ZMQError:
            inbox.close(linger=0)
            raise
        return inbox

    async def _some_arrived(self, inbox: zmq.Socket[bytes]) -> None:
        """Wait until something may have arrived. The inbox must just have said that nothing is there: its descriptor
        tells of changes only.
        """
        loop = asyncio.get_running_loop()
        if self._watched is None:
            self._watched = inbox.fileno()
            loop.add_reader(self._watched, self._wake)
        self._arrived = loop.create_future()
        try:
            await self._arrived
        finally:
            self._arrived = None

    def _wake(self) -> None:
        if self._arrived is None:
            self._look_away()  # nobody reads now, and until somebody does the loop would come here in each of its turns
        elif not self._arrived.done():
            self._arrived.set_result(None)

    def _look_away(self) -> None:
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = None

    async def _close(self) -> None:
        self._look_away()
        for peer in list(self._peers):
            self._peers.pop(peer).close(linger=LINGER_MS)
        if self._inbox is not None:
            self._inbox.close(linger=0)
            self._inbox = None
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
            await asyncio.sleep(0)  # lets its cancelled task end before its socket's context does
        if self._context is not None:
            self._context.term()
            self._context = None

    def _drop(self, error: WireError) -> None:
        self.num_dropped += 1
        if self.num_dropped & (self.num_dropped - 1) == 0:  # 1, 2, 4, 8, ...: a flood must not fill the log
            log.warning("dropped a control message (%d so far): %s", self.num_dropped, error)

    def _socket(self, peer: Party) -> zmq.Socket[bytes]:
        name = (peer.address, peer.epoch)
        socket = self._peers.pop(name, None) or self._connect(peer)
        self._peers[name] = socket
        if len(self._peers) > MAX_PEERS:
            self._peers.pop(next(iter(self._peers))).close(linger=LINGER_MS)
        return socket

    def _connect(self, peer: Party) -> zmq.Socket[bytes]:
        host, _colon, port = peer.address.removeprefix("tcp://").rpartition(":")
        if not port.isdecimal() or not 0 < int(port) < 65536:  # ZeroMQ would take the port modulo 65536
            raise ChannelError(f"{peer.id} has no usable address")
        if self._keys is None and not is_loopback(host.strip("[]")):
            raise ChannelError(f"{peer.id} is not on loopback, and without a shared secret nothing else is dialled")
        if self._context is None:
            raise ChannelError("the channel is not open")
        socket: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        try:
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.IPV6, int("[" in peer.address))
            if self._keys is not None:
                socket.curve_publickey, socket.curve_secretkey = self._keys
                socket.curve_serverkey = self._keys[0]
            socket.connect(peer.address)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket


def _may_use_batch_policy() -> bool:
    """Tried on this thread and taken back, because libzmq ends the process if the system refuses it a policy."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    try:
        for policy in (os.SCHED_BATCH, os.SCHED_OTHER):
            os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True


class _OneKey:
    """ZAP credentials provider that admits exactly the cluster's own public key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq with the client's Z85 public key."""
        del domain
        return key == self._public_key


def _curve_keys(secret: bytes) -> tuple[bytes, bytes]:
    """(public, secret) Z85 keys derived from the shared secret."""
    from zmq.utils import z85

    secret_key = z85.encode(blake2b(secret, digest_size=32, person=b"baton-curve").digest())
    return zmq.curve_public(secret_key), secret_key
