"""The sending end of a NIXL connection: ask for blocks, write those that are wanted, say what has landed."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvtransfer import nixl_wire as wire
from kvtransfer.connection import OutboundConnection
from kvtransfer.events import PeerLost
from kvtransfer.nixl import Agent, Write, lanes
from kvtransfer.nixl_inbound import POLL_S
from kvtransfer.nixl_stream import Stream
from kvtransfer.road import RoadContext
from kvtransfer.routes import Route
from kvtransfer.sends import Push, PushItem
from kvtransfer.tcp_wire import NONCE_BYTES, Transcript, WireError, connecting
from kvtransfer.ticket import Hello, PeerId

CONNECT_TIMEOUT_S: Final = 5.0
# One operation of NIXL, and all of them together. What is begun cannot be called back.
WRITE_BYTES: Final = 8 << 20
WINDOW_BYTES: Final = 16 << 20


@dataclass(eq=False)
class _Sending:
    """A push as this connection sees it: what it asked for and what the receiver said, by index in the ticket.

    ``unanswered`` were asked for; ``allowed`` may be written and are the receiver's to wait for; ``refused`` are not
    wanted, and count as sent like a block that a TCP receiver drains.
    """

    push: Push
    asked: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    allowed: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    @property
    def over(self) -> bool:
        return self.push.over and not self.unanswered and not self.allowed


@dataclass(frozen=True)
class _Posted:
    """Blocks of one write; None if it could not even begin, and the connection is about to be closed."""

    write: Write | None
    push: Push
    items: tuple[PushItem, ...]


class NixlOutbound(OutboundConnection):
    """Owned by the kv-io thread."""

    def __init__(self, hello: Hello, context: RoadContext, now: float) -> None:
        self.peer: PeerId = hello.peer
        self.address = hello.addresses["nixl"]
        self.deadline: float | None = now + CONNECT_TIMEOUT_S
        self._context = context
        self._receiver_fingerprint = hello.fingerprint
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript: Transcript | None = None
        self._connected = False
        self._agent: Agent | None = None
        self._sendings: dict[int, _Sending] = {}
        self._turns: deque[_Sending] = deque()
        self._posted: list[_Posted] = []
        self.sock = connecting(self.address)
        self._stream = Stream(self.sock, to_sender=True)

    @property
    def wants_write(self) -> bool:
        return not self._connected or self._stream.wants_write

    @property
    def busy(self) -> bool:
        sends = self._context.sends
        return (
            bool(self._posted)
            or self._stream.wants_write
            or any(sends.waiting(sending.push, 1) for sending in self._sendings.values())
        )

    def add(self, push: Push) -> None:
        self._context.seal(push)
        sending = self._sendings.setdefault(push.ticket_id, _Sending(push))
        if sending not in self._turns:
            self._turns.append(sending)
        if self._agent is not None:
            self._ask(sending)
            self._turn()

    def on_ready(self, now: float) -> None:  # noqa: ARG002 - same call as every connection
        """Raises `WireError` or OSError when the connection must be closed."""
        if not self._connected:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._connected = True
        self._stream.flush()
        for message in self._stream.read():
            self._on_message(message)
        if self._agent is not None:
            self._turn()

    def on_deadline(self) -> None:
        if self._agent is None:
            raise WireError("no answer")
        self._turn()

    def close(self, reason: str) -> None:
        """The fence, then fail every push to this peer: nothing reads its blocks any more."""
        self.sock.close()
        self._context.routes.closed(self)
        posted, self._posted = self._posted, []
        lost = [(each.push, item.index) for each in posted for item in each.items]
        # Writes hold on to the agent.
        posted.clear()
        if self._agent is not None:
            self._agent.destroy()
        self._sendings.clear()
        self._turns.clear()
        sends = self._context.sends
        for push in sends.pushes_to(self.peer, "nixl"):
            if push.address == self.address:
                sends.fail(push, reason)
        for push, index in lost:
            sends.lost(push, index)

    def lost_event(self) -> PeerLost | None:
        return None if self._agent is None else PeerLost(self.peer.node_id, self.peer.epoch)

    def _on_message(self, message: wire.ToSender | wire.ToReceiver) -> None:
        match message:
            case wire.Challenge(_, nonce) if self._transcript is None:
                me, context = self._context.me, self._context
                self._transcript = Transcript(nonce, self._nonce, me, self.peer, self._receiver_fingerprint)
                mac = self._transcript.mac(wire.SENDER_ROLE, context.secret)
                self._stream.send(wire.Reply(me.node_id, me.epoch, self._nonce, mac))
            case wire.Welcome() if self._transcript is not None and self._agent is None:
                self._on_welcome(self._transcript, message)
            case wire.Allow(ticket_id, allowed, refused):
                self._on_allow(ticket_id, set(allowed), set(refused))
            case wire.Stop(ticket_id):
                if (sending := self._sendings.get(ticket_id)) is not None:
                    sending.refused |= self._release(sending)
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def _on_welcome(self, transcript: Transcript, welcome: wire.Welcome) -> None:
        context, region = self._context, welcome.region
        if not transcript.proves(wire.receiver_role(welcome.metadata, region), context.secret, welcome.mac):
            raise WireError("the receiver does not know the secret")
        if region.block_bytes != context.block_bytes:
            raise WireError(f"the receiver has blocks of {region.block_bytes} bytes")
        if (refusal := context.routes.connected(self, Route(self.peer, "sending", "nixl", lanes()))) is not None:
            raise WireError(refusal)
        self._agent = Agent(context.pool)
        self._agent.connect(welcome.metadata, region)
        for sending in self._turns:
            self._ask(sending)

    def _ask(self, sending: _Sending) -> None:
        push, context = sending.push, self._context
        items = [item for item in context.sends.waiting(push) if item.index not in sending.asked]
        for start in range(0, len(items), wire.MAX_ASKED):
            part = items[start : start + wire.MAX_ASKED]
            indexes = {item.index for item in part}
            sending.asked |= indexes
            sending.unanswered |= indexes
            wishes = (wire.Wish(each.index, each.handle.generation, context.digest(push, each)) for each in part)
            self._stream.send(wire.Ask(push.ticket_id, tuple(wishes)))

    def _on_allow(self, ticket_id: int, allowed: set[int], refused: set[int]) -> None:
        sending = self._sendings.get(ticket_id)
        if sending is None or not allowed | refused <= sending.unanswered or allowed & refused:
            raise WireError(f"ticket {ticket_id}: an answer to nothing that was asked")
        sending.unanswered -= allowed | refused
        sending.allowed |= allowed
        sending.refused |= refused

    def _turn(self) -> None:
        """Report what has landed, let go of what will not be written, begin what may be."""
        self._reap()
        for sending in list(self._sendings.values()):
            if sending.push.over:
                self._release(sending)
            if sending.over:
                del self._sendings[sending.push.ticket_id]
        self._fill()
        self.deadline = time.monotonic() + POLL_S if self._posted else None

    def _reap(self) -> None:
        for each in list(self._posted):
            if each.write is None or not each.write.done():
                continue
            self._posted.remove(each)
            indexes = tuple(item.index for item in each.items)
            # First the ledger: the socket may be broken.
            self._context.sends.sent(each.push, *indexes)
            each.write.release()
            self._stream.send(wire.Landed(each.push.ticket_id, indexes))

    def _release(self, sending: _Sending) -> set[int]:
        """Tell the receiver that these will not be written."""
        released, sending.allowed = sending.allowed, set()
        if released:
            self._stream.send(wire.Released(sending.push.ticket_id, tuple(sorted(released))))
        return released

    def _fill(self) -> None:
        """Begin writes, tickets in turn, while the window has room. One that waits for an answer is passed over."""
        passed_over: list[_Sending] = []
        while self._turns and (not self._posted or self._posted_bytes() + WRITE_BYTES <= WINDOW_BYTES):
            sending = self._turns.popleft()
            items = self._take(sending)
            if items:
                self._post(sending.push, items)
                # A write within this host is over at once.
                self._reap()
            if self._context.sends.waiting(sending.push, 1):
                (self._turns if items else passed_over).append(sending)
        self._turns.extend(passed_over)

    def _posted_bytes(self) -> int:
        return sum(len(each.items) for each in self._posted) * self._context.block_bytes

    def _take(self, sending: _Sending) -> list[PushItem]:
        """The next blocks that may be written, for one write."""
        sends, push = self._context.sends, sending.push
        limit = max(1, WRITE_BYTES // self._context.block_bytes)
        items: list[PushItem] = []
        while len(items) < limit and (waiting := sends.waiting(push, 1)):
            index = waiting[0].index
            if index not in sending.allowed and index not in sending.refused:
                break
            item = sends.take(push)
            if item is None:
                break  # cancelled this moment
            if item.index in sending.allowed:
                sending.allowed.discard(item.index)
                items.append(item)
            else:
                sends.sent(push, item.index)
        return items

    def _post(self, push: Push, items: list[PushItem]) -> None:
        ours, theirs = [item.block_id for item in items], [item.handle.block_id for item in items]
        write: Write | None = None
        try:
            if self._agent is None:
                raise WireError("not connected")
            write = self._agent.write(ours, theirs)
        finally:
            # Failed or not: the ledger hears of these blocks when the agent no longer reads them.
            self._posted.append(_Posted(write, push, tuple(items)))
