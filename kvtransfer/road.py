"""What a transport must do. A plane has one road per scheme; all roads of a plane share its two ledgers.

A road moves bytes and nothing else: what may be written is decided by `ReceiveLedger.claim`, what is to be sent
comes from `SendLedger.take`. It never raises for a peer's fault; it reports it to the ledgers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.dead import DeadPeers
from kvtransfer.events import EventBox
from kvtransfer.receives import ReceiveLedger
from kvtransfer.sends import Push, SendLedger
from kvtransfer.ticket import PeerId

Pool = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RoadContext:
    """What every road of a plane works with. ``pool`` is ``[num_blocks, block_bytes]`` and is borrowed."""

    pool: Pool
    me: PeerId
    fingerprint: str
    secret: bytes | None
    host: str
    events: EventBox
    receives: ReceiveLedger
    sends: SendLedger
    dead: DeadPeers

    @property
    def block_bytes(self) -> int:
        return int(self.pool.shape[1])


class Road(ABC):
    """One transport of one plane. Its methods are called from the owner's thread and never wait for a peer."""

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

    @abstractmethod
    def connections(self) -> int:
        """Connections (or endpoints) open now, both directions."""

    @abstractmethod
    def transport(self) -> str:
        """What really carries the bytes, as far as it can be learnt."""

    @abstractmethod
    def close(self, *, flush: bool) -> None:
        """End the road and join its thread. ``flush`` first sends, for at most a few seconds, what is queued.

        Afterwards nothing reads or writes the pool. Idempotent.
        """
