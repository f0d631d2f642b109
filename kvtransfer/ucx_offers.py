"""Blocks that are not sent: the receiver is told where in the sender's memory they lie, and copies them itself.

Within a host, where the receiver can map the sender's pool, this is one copy at memcpy's rate. It is the same consent
as ever: the receiver claims each block before it writes it, the sender keeps each block until it is told that the
offer has been answered, as it keeps a posted one until UCX has sent it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvtransfer.receives import Claim
from kvtransfer.road import Pool, RoadContext
from kvtransfer.sends import Push, PushItem
from kvtransfer.shared_memory import MemoryName, PeerMemory, map_peer
from kvtransfer.ticket import PeerId
from kvtransfer.ucx_wire import Introduced, Outcome

logger = logging.getLogger(__name__)

# So long the receiver looks at nothing else, 1.6 ms at 10 GB/s; and two of them keep it at work.
# (Measured, 64 blocks of 512 KiB: 14.4 GB/s, 13.6 with half of both.)
MAX_OFFER_BYTES: Final = 16 << 20
MAX_OFFERED_BYTES: Final = 32 << 20

# Of the process, not of a link: the answer to an offer of an earlier link must not be taken for another's.
_numbers: Final = count(1)


class Offers:
    """Sender: what one receiver has been offered and has not answered. Owned by its link.

    ``possible`` turns false, for good, when that receiver says that it cannot read our memory.
    """

    def __init__(self, *, possible: bool) -> None:
        self.possible = possible
        self._open: dict[int, tuple[Push, list[PushItem]]] = {}

    @property
    def num_blocks(self) -> int:
        """That may be read any moment."""
        return sum(len(items) for _, items in self._open.values())

    def add(self, push: Push, items: list[PushItem]) -> int:
        """Returns the number the offer goes by."""
        number = next(_numbers)
        self._open[number] = (push, items)
        return number

    def end(self, number: int, outcome: Outcome) -> tuple[Push, list[PushItem]] | None:
        """These are not read any more. None for an offer that is not (any more) open."""
        ended = self._open.pop(number, None)
        if ended is not None and outcome == "unreadable":
            self.possible = False
        return ended

    def give_up(self) -> Iterator[tuple[Push, PushItem]]:
        """Forget them all."""
        ended, self._open = self._open, {}
        return ((push, item) for push, items in ended.values() for item in items)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """``pool`` ``[num_blocks, block_bytes]`` of a peer, if its memory could be mapped."""

    name: MemoryName
    memory: PeerMemory | None
    pool: Pool | None


class PeerMemories:
    """Receiver: the pools of peers on this host, as they were told and could be mapped. Owned by one road."""

    def __init__(self, context: RoadContext) -> None:
        self._context = context
        self._mapped: dict[PeerId, _Mapped] = {}

    def can_read(self, said: Introduced) -> bool:
        """Whether the blocks of this offer can be copied; maps the peer's memory with its first offer."""
        return self._pool(said) is not None

    def copy(self, ticket_id: int, said: Introduced) -> None:
        """Claim, copy and report every block of an offer; what is not wanted is counted as refused."""
        receives, pool = self._context.receives, self._context.pool
        theirs = self._pool(said)
        sources = {block.position: block.source for block in said.blocks}
        copied: list[Claim] = []
        for claim in receives.claim_all(ticket_id, sources, said.peer):
            source = sources[claim.index]
            if theirs is None or source >= len(theirs):
                receives.abandon([claim], f"block {claim.index} was offered where there is none")
                continue
            pool[claim.block_id] = theirs[source]
            # At once, while the block is in the cache.
            if self._context.check(claim):
                copied.append(claim)
        # The owner's thread takes the GIL when it is woken: once a turn, not once a block.
        receives.landed(copied, wake=False)

    def forget(self, peer: PeerId) -> None:
        """It offers nothing any more, or maps anew; unknown is fine."""
        mapped = self._mapped.pop(peer, None)
        if mapped is not None and mapped.memory is not None:
            mapped.memory.release()

    def clear(self) -> None:
        """Forget them all."""
        self._mapped.clear()

    def _pool(self, said: Introduced) -> Pool | None:
        name, mapped = said.memory, self._mapped.get(said.peer)
        if name is None:
            return None
        if mapped is None or mapped.name != name:
            self.forget(said.peer)
            mapped = self._mapped[said.peer] = self._map(said.peer, name)
        return mapped.pool

    def _map(self, peer: PeerId, name: MemoryName) -> _Mapped:
        # A GPU's blocks do not lie in our pool: they are sent.
        memory = None if self._context.on_device else map_peer(name)
        if memory is None:
            logger.info("the pool of %s cannot be mapped here: its blocks are sent", peer.node_id)
            return _Mapped(name, None, None)
        size = self._context.block_bytes
        num_blocks = len(memory.bytes) // size
        return _Mapped(name, memory, memory.bytes[: num_blocks * size].reshape(num_blocks, size))
