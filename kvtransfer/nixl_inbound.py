"""The receiving end of a NIXL connection: consent to blocks, and the agent through which they come.

Fence. From Allow on the sender may write a block at any moment, so its claim is out until the sender says Landed or
Released. If the connection breaks first, the agent is destroyed, and only then the claims are given back.
"""

from __future__ import annotations

import secrets
import socket
import time
from typing import Final

from kvtransfer import nixl_wire as wire
from kvtransfer.connection import InboundConnection
from kvtransfer.events import PeerLost
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.nixl import Agent, lanes
from kvtransfer.nixl_stream import Stream
from kvtransfer.receives import Claim
from kvtransfer.road import RoadContext
from kvtransfer.routes import Route
from kvtransfer.tcp_wire import NONCE_BYTES, Transcript, WireError
from kvtransfer.ticket import PeerId

HANDSHAKE_TIMEOUT_S: Final = 5.0
# While blocks are coming somebody must let UCX work; a socket buffer lasts longer than this.
POLL_S: Final = 0.00005


class NixlInbound(InboundConnection):
    """Owned by the kv-io thread."""

    def __init__(self, sock: socket.socket, context: RoadContext, now: float) -> None:
        self.sock = sock
        self.peer: PeerId | None = None
        self.deadline: float | None = now + HANDSHAKE_TIMEOUT_S
        self._context = context
        self._stream = Stream(sock, to_sender=False)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._agent: Agent | None = None
        self._claims: dict[tuple[int, int], Claim] = {}
        self._stopped: set[int] = set()
        self._stream.send(wire.Challenge(WIRE_VERSION, self._nonce))

    @property
    def wants_write(self) -> bool:
        return self._stream.wants_write

    def on_ready(self, now: float) -> None:  # noqa: ARG002 - same call as every connection
        """Raises `WireError` or OSError when this connection must be closed."""
        self._stream.flush()
        for message in self._stream.read():
            self._on_message(message)
        self._poll()

    def on_deadline(self) -> None:
        if self.peer is None:
            raise WireError("too slow")
        self._poll()

    def settle_withdrawn(self) -> None:
        """Ask the sender to stop writing; it answers for each block."""
        receives = self._context.receives
        for ticket_id in {ticket_id for ticket_id, _ in self._claims} - self._stopped:
            if receives.is_withdrawing(ticket_id):
                self._stopped.add(ticket_id)
                self._stream.send(wire.Stop(ticket_id))

    def close(self, reason: str) -> None:
        """The fence, then give back the claims."""
        self.sock.close()
        self._context.routes.closed(self)
        if self._agent is not None:
            self._agent.destroy()
        claims, self._claims = list(self._claims.values()), {}
        self._context.receives.abandon(claims, reason)

    def lost_event(self) -> PeerLost | None:
        return None if self.peer is None else PeerLost(self.peer.node_id, self.peer.epoch)

    def _poll(self) -> None:
        if self._claims and self._agent is not None:
            self._agent.progress()
        if self.peer is not None:
            self.deadline = time.monotonic() + POLL_S if self._claims else None

    def _on_message(self, message: wire.ToSender | wire.ToReceiver) -> None:
        match message:
            case wire.Reply() if self.peer is None:
                self._on_reply(message)
            case wire.Ask(ticket_id, wishes) if self.peer is not None:
                self._on_ask(self.peer, ticket_id, wishes)
            case wire.Landed(ticket_id, indexes):
                self._context.arrive(self._take_back(ticket_id, indexes))
            case wire.Released(ticket_id, indexes):
                self._context.receives.release(self._take_back(ticket_id, indexes))
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def _on_reply(self, reply: wire.Reply) -> None:
        context = self._context
        peer = PeerId(reply.node_id, reply.epoch)
        if reply.epoch >= 1 << 64:
            raise WireError("epoch does not fit 64 bits")
        transcript = Transcript(self._nonce, reply.nonce, peer, context.me, context.fingerprint)
        if not transcript.proves(wire.SENDER_ROLE, context.secret, reply.mac):
            raise WireError("handshake refused")
        if peer in context.dead:
            raise WireError("peer was declared dead")
        if (refusal := context.routes.connected(self, Route(peer, "receiving", "nixl", lanes()))) is not None:
            raise WireError(refusal)
        self._agent = Agent(context.pool)
        metadata, region = self._agent.metadata(), self._agent.region
        mac = transcript.mac(wire.receiver_role(metadata, region), context.secret)
        self.peer = peer
        self._stream.send(wire.Welcome(mac, metadata, region.base, region.block_bytes, region.num_blocks))

    def _on_ask(self, peer: PeerId, ticket_id: int, wishes: tuple[wire.Wish, ...]) -> None:
        allowed: list[int] = []
        refused: list[int] = []
        for wish in wishes:
            claim = self._context.receives.claim(ticket_id, wish.index, wish.generation, peer, wish.digest)
            (refused if claim is None else allowed).append(wish.index)
            if claim is not None:
                self._claims[ticket_id, wish.index] = claim
        self._stream.send(wire.Allow(ticket_id, tuple(allowed), tuple(refused)))

    def _take_back(self, ticket_id: int, indexes: tuple[int, ...]) -> list[Claim]:
        if len(set(indexes)) < len(indexes) or any((ticket_id, index) not in self._claims for index in indexes):
            raise WireError(f"a block of ticket {ticket_id} that was not allowed")
        claims = [self._claims.pop((ticket_id, index)) for index in indexes]
        if ticket_id in self._stopped and not any(ticket == ticket_id for ticket, _ in self._claims):
            self._stopped.discard(ticket_id)
        return claims
