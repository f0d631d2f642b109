"""The control plane: typed messages between processes over ZeroMQ.

Every process binds one PULL socket and opens one PUSH socket per peer. Sending never blocks: if a peer's queue is
full the message is refused with :class:`ChannelError`. Delivery to a dead peer is silent, as on any network:
heartbeats (`router/registry.py`) decide life and death, and every exchange has a deadline.

With a shared secret all sockets speak CURVE: the secret yields the one key pair of this cluster, servers admit
that key only and clients know the server by it. Without a secret only loopback may be bound.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from cluster.config import ClusterConfig, is_loopback
from cluster.wire import MAX_FRAME_BYTES, Envelope, Message, Party, WireError, decode, encode

log = logging.getLogger(__name__)

SEND_QUEUE_FRAMES = 10_000
LINGER_MS = 500


class ChannelError(Exception):
    """A message could not be handed to ZeroMQ, or the socket could not be bound."""


class Channel:
    """One process's end of the control plane. Owns its sockets and ZeroMQ context; use as ``async with``."""

    def __init__(self, config: ClusterConfig) -> None:
        if config.secret is None and not is_loopback(config.bind_host):
            raise ChannelError("a non-loopback bind needs the shared secret")
        self._config = config
        self._context = zmq.asyncio.Context()
        self._inbox: zmq.asyncio.Socket | None = None
        self._peers: dict[tuple[str, int], zmq.Socket[bytes]] = {}
        self._keys = _curve_keys(config.secret) if config.secret else None
        self._authenticator: AsyncioAuthenticator | None = None
        self._party: Party | None = None
        self.num_dropped = 0

    @property
    def party(self) -> Party:
        """This process as others address it; valid once the channel is open."""
        if self._party is None:
            raise ChannelError("the channel is not open yet")
        return self._party

    async def __aenter__(self) -> Channel:
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        inbox.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=_OneKey(self._keys[0]))
            inbox.curve_publickey, inbox.curve_secretkey = self._keys
            inbox.curve_server = True
        try:
            inbox.bind(f"tcp://{self._config.bind_host}:0")
        except zmq.ZMQError as error:
            raise ChannelError(f"cannot bind the control socket to {self._config.bind_host}: {error}") from error
        port = bytes(inbox.getsockopt(zmq.LAST_ENDPOINT)).rsplit(b":", 1)[1].rstrip(b"\0").decode()
        self._inbox = inbox
        self._party = Party(self._config.node_id, self._config.epoch, f"tcp://{self._config.advertise_host}:{port}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in list(self._peers):
            self._peers.pop(peer).close(linger=LINGER_MS)
        if self._inbox is not None:
            self._inbox.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def send(self, peer: Party, message: Message) -> None:
        """Queue ``message`` for ``peer``; returns at once. Raises :class:`ChannelError` if its queue is full."""
        socket = self._peers.get((peer.address, peer.epoch)) or self._connect(peer)
        try:
            frame = encode(Envelope(self.party, peer.epoch, message))
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise ChannelError(f"the queue to {peer.id} is full") from None
        except WireError as error:
            raise ChannelError(str(error)) from error

    async def receive(self) -> Envelope:
        """The next message meant for this life of this process; anything else is counted and dropped."""
        if self._inbox is None:
            raise ChannelError("the channel is not open yet")
        while True:
            frames = await self._inbox.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames in one message")
                envelope = decode(frames[0])
            except WireError as error:
                self.num_dropped += 1
                log.warning("dropped a malformed control message: %s", error)
                continue
            if envelope.to_epoch != self._config.epoch:
                self.num_dropped += 1
                continue
            return envelope

    def forget(self, peer: Party) -> None:
        """Close the socket to a dead peer and drop what is queued for it."""
        socket = self._peers.pop((peer.address, peer.epoch), None)
        if socket is not None:
            socket.close(linger=0)

    def _connect(self, peer: Party) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys
            socket.curve_serverkey = self._keys[0]
        try:
            socket.connect(peer.address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ChannelError(f"cannot connect to {peer.id}: {error}") from error
        self._peers[(peer.address, peer.epoch)] = socket
        return socket


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
