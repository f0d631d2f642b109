"""The receiving end of one TCP connection: handshake, then blocks straight from the socket into the pool."""

from __future__ import annotations

import secrets
import socket
from typing import Final

from kvtransfer import tcp_wire as wire
from kvtransfer.connection import InboundConnection
from kvtransfer.events import PeerLost
from kvtransfer.receives import Claim
from kvtransfer.road import RoadContext
from kvtransfer.routes import Route
from kvtransfer.tcp_wire import WireError
from kvtransfer.ticket import PeerId

# A peer of ours answers in milliseconds. Who is slower holds a slot that another could use.
HANDSHAKE_TIMEOUT_S: Final = 5.0
HEADER_TIMEOUT_S: Final = 5.0
# No byte of a block for so long: the peer hangs; the owner's deadlines have usually decided earlier.
STALL_TIMEOUT_S: Final = 30.0
# Then other connections get their turn.
_TURN_BYTES: Final = 8 << 20


class Inbound(InboundConnection):
    """Owned by the kv-io thread. ``deadline`` (monotonic s) is when the current stage must have ended."""

    def __init__(self, sock: socket.socket, context: RoadContext, scratch: memoryview, now: float) -> None:
        self.sock = sock
        self.peer: PeerId | None = None
        self.deadline: float | None = now + HANDSHAKE_TIMEOUT_S
        self._context = context
        self._scratch = scratch
        self._nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._reply: wire.Reply | None = None
        self._head = bytearray(wire.REPLY_BYTES)
        self._have = 0
        self._claim: Claim | None = None
        self._payload: memoryview | None = None
        self._missing = 0
        sock.sendall(wire.pack_greeting(self._nonce))

    def on_ready(self, now: float) -> None:
        """Read what is there. Raises `WireError` or OSError when this connection must be closed."""
        budget = _TURN_BYTES
        try:
            while budget > 0:
                budget -= self._read_payload(now) if self._missing else self._read_head(now)
        except BlockingIOError:
            return

    def on_deadline(self) -> None:
        raise WireError("too slow")

    def settle_withdrawn(self) -> None:
        """If the ticket of the landing block was withdrawn, read the rest of it into scratch."""
        if self._claim is not None and self._context.receives.is_withdrawing(self._claim.ticket_id):
            claim, self._claim, self._payload = self._claim, None, None
            self._context.receives.abandon([claim], "withdrawn")

    def close(self, reason: str) -> None:
        """Close the socket; the block that was landing did not arrive."""
        self.sock.close()
        self._context.routes.closed(self)
        claim, self._claim, self._payload = self._claim, None, None
        if claim is not None:
            self._context.receives.abandon([claim], reason)

    def lost_event(self) -> PeerLost | None:
        return None if self.peer is None else PeerLost(self.peer.node_id, self.peer.epoch)

    def _read_head(self, now: float) -> int:
        count = self._recv(memoryview(self._head)[self._have :])
        if self.proven and self._have == 0:
            self.deadline = now + HEADER_TIMEOUT_S
        self._have += count
        if self._have == len(self._head):
            self._on_head(now)
        return count

    def _on_head(self, now: float) -> None:
        self._have = 0
        if self.peer is not None:
            self._on_header(self.peer, wire.parse_header(self._head, self._context.block_bytes), now)
        elif self._reply is None:
            self._reply = wire.parse_reply(self._head)
            self._head = bytearray(self._reply.node_id_bytes)
        else:
            self._on_node_id(self._reply, wire.parse_node_id(self._head))
            self._head = bytearray(wire.HEADER_BYTES)

    def _on_node_id(self, reply: wire.Reply, node_id: str) -> None:
        context = self._context
        peer = PeerId(node_id, reply.epoch)
        transcript = wire.Transcript(self._nonce, reply.nonce, peer, context.me, context.fingerprint)
        if not transcript.proves(b"sender", context.secret, reply.mac):
            raise WireError("handshake refused")
        if peer in context.dead:
            raise WireError("peer was declared dead")
        self.sock.sendall(wire.pack_greeting(transcript.mac(b"receiver", context.secret)))
        self.peer = peer
        context.routes.connected(self, Route(peer, "receiving", "tcp", "tcp"))
        self.deadline = None

    def _on_header(self, peer: PeerId, header: wire.Header, now: float) -> None:
        # A refused block is drained, not an error: a cancelled ticket's last blocks are always on their way.
        claim = self._context.receives.claim(header.ticket_id, header.index, header.generation, peer, header.digest)
        self._claim = claim
        self._payload = None if claim is None else memoryview(self._context.pool[claim.block_id])
        self._missing = header.length
        self.deadline = now + STALL_TIMEOUT_S

    def _read_payload(self, now: float) -> int:
        if self._payload is None:
            target = self._scratch[: self._missing]
        else:
            target = self._payload[len(self._payload) - self._missing :]
        count = self._recv(target)
        self._missing -= count
        self.deadline = now + STALL_TIMEOUT_S
        if self._missing == 0:
            claim, self._claim, self._payload = self._claim, None, None
            self.deadline = None
            if claim is not None:
                self._context.arrive([claim])
        return count

    def _recv(self, target: memoryview) -> int:
        count = self.sock.recv_into(target)
        if count == 0:
            raise ConnectionResetError("closed by the peer")
        return count
