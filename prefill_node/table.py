"""The prefill node's requests and their blocks: the one place where blocks change hands."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.request import RequestKey
from engine.audit import Held, find_orphans
from engine.block_pool import BlockPool, BlockReport
from engine.remembered import Tombstones
from prefill_node.handoff import Handoff, HandoffState


class HandoffTable:
    """Owns the block pool's bookkeeping."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self._block_size = block_size
        self._handoffs: dict[RequestKey, Handoff] = {}
        self._by_ticket: dict[int, Handoff] = {}
        self._ended = Tombstones()

    def __iter__(self) -> Iterator[Handoff]:
        """In order of arrival; a copy, so that entries may end on the way."""
        return iter(list(self._handoffs.values()))

    def __len__(self) -> int:
        return len(self._handoffs)

    def get(self, key: RequestKey) -> Handoff | None:
        """The live request of that name."""
        return self._handoffs.get(key)

    def of_ticket(self, ticket_id: int) -> Handoff | None:
        """The request whose transfer this is."""
        return self._by_ticket.get(ticket_id)

    def in_state(self, state: HandoffState) -> list[Handoff]:
        """Those in ``state``, in order of arrival."""
        return [handoff for handoff in self._handoffs.values() if handoff.state is state]

    def has_ended(self, key: RequestKey) -> bool:
        """True if this dispatch was here, or was cancelled before it came."""
        return key in self._ended

    def bury(self, key: RequestKey) -> None:
        """Never start this dispatch."""
        self._ended.add(key)

    def add(self, handoff: Handoff) -> None:
        """Take in a queued request; it holds no block yet."""
        self._handoffs[handoff.key] = handoff
        if handoff.transfer is not None:
            self._by_ticket[handoff.transfer.ticket_id] = handoff

    def take_blocks(self, handoff: Handoff) -> bool:
        """Share the cached prefix and allocate the rest of the prompt; False, taking nothing, if there is no room."""
        size = self._block_size
        # The last prompt token is always computed: its logits are token 0. Those of cached tokens are not kept.
        num_useful = (len(handoff.prompt) - 1) // size if handoff.num_prompt_logprobs is None else 0
        shared = self.pool.match(handoff.block_names[:num_useful])
        num_new = -(-len(handoff.prompt) // size) - len(shared)
        if self.pool.num_free - self.pool.num_free_among(shared) < num_new:
            return False
        self.pool.share(shared, handoff.owner)
        handoff.block_table = shared + self.pool.allocate(num_new, handoff.owner)
        handoff.num_cached = handoff.num_computed = len(shared) * size
        handoff.num_named = len(shared)
        if (ticket := handoff.ticket) is not None:
            handoff.num_pushed = ticket.first_missing_token // ticket.block_size
        return True

    def name_full_blocks(self, handoff: Handoff) -> None:
        """Let others find the blocks that the last step completed."""
        num_full = handoff.num_computed // self._block_size
        for index in range(handoff.num_named, num_full):
            self.pool.name(handoff.block_table[index], handoff.block_names[index])
        handoff.num_named = max(handoff.num_named, num_full)

    def distrust(self, handoff: Handoff) -> None:
        """The engine could not go on from these blocks: a retry must compute them anew, not find them."""
        self.pool.forget_names(handoff.block_table)

    def release(self, handoff: Handoff) -> int:
        """Give everything back and forget the request. Returns the number of blocks freed."""
        freed = self.pool.release(handoff.block_table, handoff.owner)
        if handoff.transfer is not None:
            del self._by_ticket[handoff.transfer.ticket_id]
        del self._handoffs[handoff.key]
        self._ended.add(handoff.key)
        return freed

    def orphans(self) -> tuple[BlockReport, ...]:
        """Blocks whose owner is not here or does not know of them."""
        held = {handoff.owner: Held(handoff.block_table) for handoff in self._handoffs.values()}
        return find_orphans(self.pool.report(), held)
