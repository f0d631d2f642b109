"""The sending end of one TCP connection: handshake, then blocks straight from the pool into the socket."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import deque
from typing import Final

from kvtransfer import tcp_wire as wire
from kvtransfer.connection import OutboundConnection
from kvtransfer.events import PeerLost
from kvtransfer.pacing import unpace
from kvtransfer.road import RoadContext
from kvtransfer.routes import Route
from kvtransfer.sends import Push, PushItem
from kvtransfer.tcp_wire import WireError
from kvtransfer.ticket import Hello, PeerId

CONNECT_TIMEOUT_S: Final = 5.0
_TURN_BYTES: Final = 8 << 20


class Outbound(OutboundConnection):
    """Owned by the kv-io thread; one per receiving plane, shared by all pushes to it.

    Only one block is posted at a time: the kernel's socket buffer is the window, so that a cancel leaves at
    most one block to drain and tickets take turns block by block.
    """

    def __init__(self, hello: Hello, context: RoadContext, now: float) -> None:
        self.peer: PeerId = hello.peer
        self.address = hello.addresses["tcp"]
        self.deadline: float | None = now + CONNECT_TIMEOUT_S
        self._context = context
        self._receiver_fingerprint = hello.fingerprint
        self._nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._transcript: wire.Transcript | None = None
        self._head = bytearray(wire.GREETING_BYTES)
        self._have = 0
        self._connected = False
        self._ready = False
        self._pushes: deque[Push] = deque()
        self._posted: tuple[Push, PushItem] | None = None
        self._unsent: list[memoryview] = []
        self.sock = wire.connecting(self.address)

    @property
    def wants_write(self) -> bool:
        return not self._connected or (self._ready and self.busy)

    @property
    def busy(self) -> bool:
        return self._posted is not None or bool(self._pushes)

    def add(self, push: Push) -> None:
        self._context.seal(push)
        if push not in self._pushes:
            self._pushes.append(push)

    def on_ready(self, now: float) -> None:  # noqa: ARG002 - same call as Inbound
        """Read, then write what is possible. Raises `WireError` or OSError when the connection must be closed."""
        if not self._connected:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._connected = True
            unpace(self.sock)
        with contextlib.suppress(BlockingIOError):
            self._read()
        if self._ready:
            self.deadline = None
            with contextlib.suppress(BlockingIOError):
                self._write()

    def on_deadline(self) -> None:
        raise WireError("no answer")

    def close(self, reason: str) -> None:
        """Close the socket and fail every push to this peer: blocks the kernel still held may be lost too."""
        self.sock.close()
        self._context.routes.closed(self)
        posted, self._posted = self._posted, None
        self._unsent = []
        self._pushes.clear()
        sends = self._context.sends
        for push in sends.pushes_to(self.peer, "tcp"):
            if push.address == self.address:
                sends.fail(push, reason)
        if posted is not None:
            sends.lost(posted[0], posted[1].index)

    def lost_event(self) -> PeerLost | None:
        return PeerLost(self.peer.node_id, self.peer.epoch) if self._ready else None

    def _read(self) -> None:
        while True:
            if self._ready:
                # The receiver says nothing after ACCEPT; reading is how its end is noticed.
                if self.sock.recv(1) == b"":
                    raise ConnectionResetError("closed by the peer")
                raise WireError("unexpected bytes")
            count = self.sock.recv_into(memoryview(self._head)[self._have :])
            if count == 0:
                raise ConnectionResetError("handshake refused")
            self._have += count
            if self._have == len(self._head):
                self._have = 0
                self._on_greeting(wire.parse_greeting(self._head))

    def _on_greeting(self, body: bytes) -> None:
        context = self._context
        if self._transcript is None:
            self._transcript = wire.Transcript(body, self._nonce, context.me, self.peer, self._receiver_fingerprint)
            mac = self._transcript.mac(b"sender", context.secret)
            self.sock.sendall(wire.pack_reply(context.me, self._nonce, mac))
        elif self._transcript.proves(b"receiver", context.secret, body):
            self._ready = True
            # No check of what it says: a plane that requires something else has no TCP road.
            self._context.routes.connected(self, Route(self.peer, "sending", "tcp", "tcp"))
        else:
            raise WireError("the receiver does not know the secret")

    def _write(self) -> None:
        budget = _TURN_BYTES
        while budget > 0 and (self._posted is not None or self._post_next()):
            count = self.sock.sendmsg(self._unsent)
            budget -= count
            while count:
                part = self._unsent[0]
                self._unsent[0] = part[count:]
                count -= min(count, len(part))
                if not self._unsent[0]:
                    del self._unsent[0]
            if not self._unsent and self._posted is not None:
                push, item = self._posted
                self._posted = None
                self._context.sends.sent(push, item.index)

    def _post_next(self) -> bool:
        while self._pushes:
            push = self._pushes.popleft()
            item = self._context.sends.take(push)
            if item is None:
                continue
            self._pushes.append(push)
            digest = self._context.digest(push, item)
            header = wire.Header(push.ticket_id, item.index, item.handle.generation, push.block_bytes, digest)
            self._posted = (push, item)
            self._unsent = [
                memoryview(wire.pack_header(header)),
                self._context.outgoing(push, item).data,
            ]
            return True
        return False
