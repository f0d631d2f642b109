"""A KV plane without bytes: the real ledgers of `kvtransfer`, and wires whose every move is somebody's choice.

A block's content is the tuple of token ids in its slots. What a plane reads or writes it reads or writes late, so
that a block given back too early is caught holding somebody else's tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.dead import DeadPeers
from kvtransfer.digest import BlockIdentity, block_digest
from kvtransfer.errors import PeerUnreachableError
from kvtransfer.events import Event, EventBox
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.receives import Claim, ReceiveLedger
from kvtransfer.regroup import Source
from kvtransfer.sends import Push, PushItem, SendLedger
from kvtransfer.ticket import BlockHandle, Hello, PeerId, TransferTicket

EMPTY = -1
LANDING = -2
POISON = -9
FINGERPRINT = "layout-a"


class Memory:
    """``[num_blocks][block_size]`` token ids; ``EMPTY`` where nothing was written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [[EMPTY] * block_size for _ in range(num_blocks)]

    def write(self, block_table: Sequence[int], position: int, token_id: int) -> None:
        self.blocks[block_table[position // self.block_size]][position % self.block_size] = token_id

    def read(self, block_table: Sequence[int], length: int) -> list[int]:
        size = self.block_size
        return [self.blocks[block_table[i // size]][i % size] for i in range(length)]

    def content(self, item: PushItem, block_size: int) -> list[int]:
        """What is sent for ``item`` to a receiver whose blocks have ``block_size`` tokens."""
        if item.run is None:
            assert block_size == self.block_size
            return list(self.blocks[item.block_id])
        first, end = item.run.first_slot, item.run.first_slot + item.run.num_tokens
        tokens = self.read(item.run.block_ids, end)[first:]
        return tokens + [EMPTY] * (block_size - len(tokens))

    def zero_tail(self, block_id: int, first: int) -> None:
        self.blocks[block_id][first:] = [EMPTY] * (self.block_size - first)


def read_by(item: PushItem) -> tuple[int, ...]:
    """The sender's blocks that are read for ``item``."""
    return (item.block_id,) if item.run is None else item.run.block_ids


def digest(content: Sequence[int], identity: BlockIdentity) -> int:
    return block_digest(np.array(content, np.int64).view(np.uint8), identity, "full")


@dataclass
class Flight:
    """A block that has left the sender's memory, with the digest of what it held there.

    Without content it brings nothing: the receiver's block keeps what it had.
    """

    ticket_id: int
    handle: BlockHandle
    index: int
    content: list[int]
    digest: int


@dataclass
class Wire:
    """One connection from a prefill node's life to a decode node's life; blocks arrive in order."""

    sender: FakePlane
    receiver: FakePlane
    posted: tuple[Push, PushItem] | None = None
    posted_is_out: bool = False
    flying: deque[Flight] = field(default_factory=deque)
    landing: tuple[Claim, list[int]] | None = None

    def moves(self) -> list[Callable[[], None]]:
        """What may happen next."""
        moves: list[Callable[[], None]] = []
        if self.posted is not None:
            moves.append(self.report_sent if self.posted_is_out else self.read)
        elif self.waiting():
            moves.append(self.post)
        if self.landing is not None:
            moves.append(self.land)
        elif self.flying:
            moves.append(self.arrive)
        return moves

    def waiting(self) -> list[Push]:
        return [push for push in self.sender.sends.pushes_to(self.receiver.me, "fake") if push.queue]

    def post(self) -> None:
        if not self.receiver.alive or self.sender.me in self.receiver.dead:
            self.cut("handshake refused")
            return
        push = self.waiting()[0]
        item = self.sender.sends.take(push)
        assert item is not None
        self.posted, self.posted_is_out = (push, item), False

    def read(self) -> None:
        assert self.posted is not None
        push, item = self.posted
        content = self.sender.memory.content(item, self.receiver.memory.block_size)
        identity = BlockIdentity(push.ticket_id, item.index, item.handle.generation)
        self.flying.append(Flight(push.ticket_id, item.handle, item.index, content, digest(content, identity)))
        assert POISON not in content, "the contents of unused slots leave the node"
        self.sender.damage(self.flying)
        self.posted_is_out = True

    def report_sent(self) -> None:
        """Perhaps long after the block has arrived, as with UCX."""
        assert self.posted is not None
        (push, item), self.posted = self.posted, None
        assert all(map(self.sender.is_owned, read_by(item))), "a block was given back while the transport read it"
        self.sender.sends.sent(push, item.index)

    def arrive(self) -> None:
        flight = self.flying.popleft()
        if not self.receiver.alive or self.sender.me in self.receiver.dead:
            return
        claim = self.receiver.receives.claim(
            flight.ticket_id, flight.index, flight.handle.generation, self.sender.me, flight.digest
        )
        if claim is not None:
            block = self.receiver.memory.blocks[claim.block_id]
            if not flight.content:
                flight.content = list(block)
            block[:] = [LANDING] * self.receiver.memory.block_size
            self.landing = (claim, flight.content)

    def land(self) -> None:
        assert self.landing is not None
        (claim, content), self.landing = self.landing, None
        self.receiver.memory.blocks[claim.block_id][:] = content
        if digest(content, claim.identity) == claim.digest:
            self.receiver.receives.landed([claim])
        else:
            self.receiver.receives.abandon([claim], "wrong digest")

    def cut(self, reason: str) -> None:
        """The connection breaks: both ends hear of it, what was on its way is lost."""
        self.flying.clear()
        landing, self.landing = self.landing, None
        if landing is not None:
            self.receiver.receives.abandon([landing[0]], reason)
        posted, self.posted = self.posted, None
        for push in self.sender.sends.pushes_to(self.receiver.me, "fake"):
            self.sender.sends.fail(push, reason)
        if posted is not None:
            self.sender.sends.lost(posted[0], posted[1].index)


class FakePlane:
    """The part of :class:`kvtransfer.plane.KVPlane` that the node loop calls, with its promises."""

    def __init__(self, me: PeerId, memory: Memory) -> None:
        self.me = me
        self.memory = memory
        self.alive = True
        self.dead = DeadPeers()
        self.wires: dict[PeerId, Wire] = {}
        self._events = EventBox(lambda: None)
        self.sends = SendLedger(len(memory.blocks), self._events)
        self.receives = ReceiveLedger(len(memory.blocks), self._events, self.dead)
        self.inbound: list[Wire] = []
        self.peers: Callable[[PeerId], FakePlane | None] = lambda _peer: None
        self.is_owned: Callable[[int], bool] = lambda _block_id: True
        self.damage: Callable[[deque[Flight]], None] = lambda _flying: None

    def hello(self) -> Hello:
        return Hello(
            version=WIRE_VERSION,
            node_id=self.me.node_id,
            epoch=self.me.epoch,
            fingerprint=FINGERPRINT,
            block_bytes=1,
            num_blocks=len(self.memory.blocks),
            addresses={"fake": b"here"},
            digest="sampled",
        )

    def push(self, ticket: TransferTicket, items: Sequence[tuple[int, Source]]) -> None:
        peer = ticket.hello.peer
        target = self.peers(peer)
        if peer in self.dead or target is None:
            raise PeerUnreachableError(f"{peer.node_id} is not there")
        same_size = target.memory.block_size == self.memory.block_size
        assert all(isinstance(source, int) == same_size for _index, source in items)
        self.sends.submit(ticket, "fake", items)
        if peer not in self.wires:
            self.wires[peer] = Wire(self, target)
            target.inbound.append(self.wires[peer])

    def peer_dead(self, node_id: str, epoch: int) -> None:
        peer = PeerId(node_id, epoch)
        self.dead.add(peer)
        self.receives.withdraw_sender(peer)
        for wire in [wire for wire in self.wires.values() if wire.receiver.me == peer]:
            wire.cut("the peer was declared dead")
        for wire in [wire for wire in self.inbound if wire.sender.me == peer]:
            wire.cut("the peer was declared dead")
        for push in self.sends.pushes_to(peer, "fake"):
            self.sends.fail(push, "the peer was declared dead")

    def poll(self) -> list[Event]:
        return self._events.drain()

    def being_read(self) -> list[int]:
        """Local blocks that the transport may still read."""
        waiting = [item for push in self.sends.all_pushes() for item in push.queue]
        posted = [wire.posted[1] for wire in self.wires.values() if wire.posted is not None]
        return [block_id for item in waiting + posted for block_id in read_by(item)]
