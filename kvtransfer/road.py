"""What a transport must do. A plane has one road per scheme; all roads of a plane share its two ledgers.

A road moves bytes and nothing else: what may be written is decided by `ReceiveLedger.claim`, what is to be sent
comes from `SendLedger.take`. It never raises for a peer's fault; it reports it to the ledgers.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtransfer.dead import DeadPeers
from kvtransfer.device_pool import DevicePool
from kvtransfer.digest import BlockIdentity, DeviceDigester, Digester
from kvtransfer.events import EventBox
from kvtransfer.meter import TransferMeter
from kvtransfer.receives import Claim, ReceiveLedger
from kvtransfer.regroup import Bytes, Regrouper, TokenRun
from kvtransfer.routes import Routes
from kvtransfer.sends import Push, PushItem, SendLedger
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.ticket import PeerId

logger = logging.getLogger(__name__)

Pool = npt.NDArray[np.uint8]

# Blocks of another size that are put together ahead of their turn; beyond that, a slow link would hold a second copy
# of whole prompts.
_STAGED_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class RoadContext:
    """What every road of a plane works with. ``pool`` is ``[num_blocks, block_bytes]`` and is borrowed.

    It begins at the start of ``memory``, if others may map it, and is the twin of a ``device`` pool, if there is one.
    A road that is ``on_device`` moves the device's blocks instead.
    """

    pool: Pool
    me: PeerId
    fingerprint: str
    secret: bytes | None
    host: str
    events: EventBox
    receives: ReceiveLedger
    sends: SendLedger
    dead: DeadPeers
    digester: Digester
    meter: TransferMeter
    routes: Routes
    regrouper: Regrouper | None = None
    memory: SharedMemory | None = None
    device: DevicePool | None = None
    on_device: bool = False

    @property
    def block_bytes(self) -> int:
        return int(self.pool.shape[1])

    def to_device(self) -> RoadContext:
        """The same for a road that takes the device's blocks as they are."""
        if self.device is None:
            raise RuntimeError("there is no device")
        return replace(self, on_device=True, digester=DeviceDigester(self.pool, self.digester, self.device))

    def block(self, block_id: int) -> Any:
        """A block of ours, as the transport reads and writes it."""
        return self.device.row(block_id) if self.on_device and self.device is not None else self.pool[block_id]

    def seal(self, push: Push, limit: int | None = None) -> None:
        """Sender: take the digest of every block that waits (or of the next ``limit``): it was final when pushed.

        On the transport's thread, before anything else: a block that its owner loses too early, while it waits for
        a slow link, is caught by the receiver.
        """
        items = [item for item in self.sends.waiting(push, limit) if item.index not in push.digests]
        ours = [item for item in items if item.run is None]
        blocks = [(item.block_id, _identity(push, item)) for item in ours]
        digests = self.digester.take_all(blocks, push.ticket.hello.digest)
        push.digests.update(zip((item.index for item in ours), digests, strict=True))
        push.digests.update((item.index, self._take_digest(push, item)) for item in items if item.run is not None)

    def digest(self, push: Push, item: PushItem) -> int:
        """Sender: what goes out with this block."""
        digest = push.digests.get(item.index)
        # A chunk that was queued while the transport was busy with the one before is not sealed yet.
        return self._take_digest(push, item) if digest is None else digest

    def outgoing(self, push: Push, item: PushItem) -> Bytes:
        """Sender: the bytes of this block, when it is posted; the transport keeps them alive until it is sent."""
        if item.run is None:
            row: Bytes = self.pool[item.block_id]
            return row
        staged = push.staged.pop(item.index, None)
        return self._gather(push, item.run) if staged is None else staged

    def arrive(self, claims: Iterable[Claim], *, wake: bool = True) -> None:
        """Receiver: these blocks have landed whole. Only one that holds what its sender says arrives.

        Without ``wake`` the road wakes the event box at the end of its turn.
        """
        good = [claim for claim in claims if self.check(claim)]
        if good:
            self.receives.landed(good, wake=wake, on_device=self.on_device)

    def check(self, claim: Claim) -> bool:
        """Receiver: whether the block that has landed holds what its sender says. One that does not is abandoned."""
        if self.digester.fits(claim.block_id, claim.identity, claim.digest):
            return True
        logger.error("%s does not hold what %s sent: wrong digest", claim, claim.peer.node_id)
        self.receives.abandon([claim], f"block {claim.index} does not hold what was sent")
        return False

    def _take_digest(self, push: Push, item: PushItem) -> int:
        identity, mode = _identity(push, item), push.ticket.hello.digest
        if item.run is None:
            return self.digester.take(item.block_id, identity, mode)
        block = push.staged.get(item.index)
        if block is None:
            block = self._gather(push, item.run)
            if (len(push.staged) + 1) * len(block) <= _STAGED_BYTES:
                push.staged[item.index] = block
        return self.digester.take_of(block, identity, mode)

    def _gather(self, push: Push, run: TokenRun) -> Bytes:
        if self.regrouper is None:
            raise RuntimeError("the plane let tokens through that it cannot cut")
        return self.regrouper.gather(run, push.block_bytes)


def _identity(push: Push, item: PushItem) -> BlockIdentity:
    return BlockIdentity(push.ticket_id, item.index, item.handle.generation)


class Road(ABC):
    """One transport of one plane. Its methods are called from the owner's thread and never wait for a peer.

    One that posts what `RoadContext.outgoing` gives, and not rows of the pool, says so: it ``regroups``. One that moves
    the blocks of a GPU as they are is ``on_device``. ``failure`` is what ended it, if that was not `close`.
    """

    regroups: bool = False
    on_device: bool = False
    failure: Exception | None = None

    @abstractmethod
    def address(self) -> bytes:
        """Where peers reach this road now; goes into the hello."""

    @abstractmethod
    def check_address(self, address: bytes) -> None:
        """Raises `HelloError` if that cannot be an address of this scheme."""

    @abstractmethod
    def start(self, push: Push) -> None:
        """Blocks of this push are waiting in the send ledger."""

    @abstractmethod
    def settle(self, ticket_id: int) -> None:
        """A withdrawn ticket has claims out: end those this road holds, as early as is safe."""

    @abstractmethod
    def peer_dead(self, peer: PeerId) -> None:
        """Drop every connection with this peer, fail its pushes, and end its claims as early as is safe."""

    def fence(self, peer: PeerId) -> None:
        """As `peer_dead` of a peer that may come back: over new connections, into new receives."""
        self.peer_dead(peer)

    @abstractmethod
    def connections(self) -> int:
        """Connections (or endpoints) open now, both directions."""

    @abstractmethod
    def transport(self) -> str:
        """What really carries the bytes, as far as it can be learnt."""

    @abstractmethod
    def close(self, *, flush: bool) -> None:
        """End the road and join its thread. ``flush`` first sends, for at most a few seconds, what is queued.

        Afterwards nothing here reads or writes the pool. Idempotent.
        """
