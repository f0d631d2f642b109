"""Who owns which KV block: free list, reference counts, generations, prefix-cache names.

Pure bookkeeping over block ids; the bytes live in :class:`engine.kv_cache.KVCache`. A block is

* *free*: nobody owns it. If it still carries a prefix name its content may be found again; the free list is in
  eviction order, so the block that has been unused longest loses its name first (as vLLM 0.9's block pool);
* *owned*: one or more owners hold it. Only a block with a single owner and no name may be written. Owners come to a
  block of somebody else by its name (a cached prefix) or from an owner that goes on as several (:meth:`fork`);
* *quarantined*: its owner is gone, but bytes may still land in it. It is neither free nor owned.

``generation`` grows each time a block leaves the free list to be written, so a late write for an earlier life
names a generation that no longer exists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class BlockPoolError(Exception):
    """A rule of ownership was broken (double free, foreign release). Always our bug, never input."""


class OutOfBlocksError(Exception):
    """Fewer free blocks than asked for; nothing was allocated."""


@dataclass(slots=True)
class _Block:
    generation: int = 0
    owners: dict[str, None] = field(default_factory=dict)
    name: bytes | None = None
    quarantined_for: str | None = None


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One non-free block as an operator sees it."""

    block_id: int
    generation: int
    owners: tuple[str, ...]
    state: str


class BlockPool:
    """Owns the fate of ``num_blocks`` blocks. Every owner (a request key's string) must give back what it took."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self._by_name: dict[bytes, int] = {}
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._num_quarantined = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, named or not."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Blocks waiting until no byte can land in them any more."""
        return self._num_quarantined

    @property
    def num_named(self) -> int:
        """Blocks a prefix lookup can find."""
        return len(self._by_name)

    def generation(self, block_id: int) -> int:
        """The block's current life."""
        return self._blocks[block_id].generation

    def is_writable(self, block_id: int, owner: str) -> bool:
        """True if ``owner`` may write the block: it is the only owner, and no lookup can find the block."""
        block = self._blocks[block_id]
        return block.name is None and list(block.owners) == [owner]

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Ids of the longest run of leading ``names`` the pool holds. Takes no ownership."""
        found: list[int] = []
        for name in names:
            block_id = self._by_name.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of ``block_ids`` are free, i.e. would leave the free list if shared."""
        return sum(1 for block_id in block_ids if block_id in self._free)

    def share(self, block_ids: Sequence[int], owner: str) -> None:
        """Make ``owner`` a reader of named blocks found by :meth:`match`."""
        for block_id in block_ids:
            if self._blocks[block_id].name is None:
                raise BlockPoolError(f"block {block_id} has no name and cannot be shared")
            self._free.pop(block_id, None)
            self._own(block_id, owner)

    def fork(self, block_ids: Sequence[int], owner: str, forks: Sequence[str]) -> None:
        """``owner`` goes on as ``forks``: each holds the blocks as it did, named or not, and it lets go of them."""
        if not forks:
            raise BlockPoolError(f"{owner} forks into nobody: its blocks would be lost")
        for block_id in block_ids:
            self._disown(block_id, owner)
            for fork in forks:
                self._own(block_id, fork)

    def allocate(self, count: int, owner: str) -> list[int]:
        """Take ``count`` blocks to write. Raises :class:`OutOfBlocksError` and takes none if there are fewer."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        taken: list[int] = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            block = self._blocks[block_id]
            if block.name is not None:
                self._forget_name(block_id)
            block.generation += 1
            self._own(block_id, owner)
            taken.append(block_id)
        return taken

    def name(self, block_id: int, name: bytes) -> None:
        """Publish a completely written block under its prefix name; a name that exists already stays where it is."""
        block = self._blocks[block_id]
        if not block.owners:
            raise BlockPoolError(f"block {block_id} is not owned and cannot be named")
        if block.name is not None or name in self._by_name:
            return
        block.name = name
        self._by_name[name] = block_id
        if name in self._removed:
            del self._removed[name]
        else:
            self._added[name] = None

    def forget_names(self, block_ids: Iterable[int]) -> None:
        """What these blocks hold is in doubt: no lookup finds them any more. Their owners keep them."""
        for block_id in block_ids:
            self._forget_name(block_id)

    def release(self, block_ids: Sequence[int], owner: str) -> int:
        """``owner`` lets go; blocks without owners become free. Returns how many did.

        The last blocks of a prefix become free first, hence are evicted first: a prefix dies from its end.
        """
        freed = 0
        for block_id in reversed(block_ids):
            self._disown(block_id, owner)
            if not self._blocks[block_id].owners:
                self._make_free(block_id)
                freed += 1
        return freed

    def quarantine(self, block_ids: Sequence[int], owner: str) -> None:
        """``owner`` is gone but bytes may still land in these blocks; only :meth:`end_quarantine` frees them."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if not self.is_writable(block_id, owner):
                raise BlockPoolError(f"block {block_id} is shared or named and cannot be quarantined")
            self._disown(block_id, owner)
            block.quarantined_for = owner
            self._num_quarantined += 1

    def end_quarantine(self, block_ids: Sequence[int], owner: str) -> int:
        """Nothing can land any more: free the blocks quarantined for ``owner``."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.quarantined_for != owner:
                raise BlockPoolError(f"block {block_id} is not quarantined for {owner}")
            block.quarantined_for = None
            self._num_quarantined -= 1
            self._make_free(block_id)
        return len(block_ids)

    def drain_name_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Names (added, removed) since the last call, for the Redis directory.

        Net: no name is in both, whatever the order in which it came and went; applying them gives what is held now.
        """
        changes = (list(self._added), list(self._removed))
        self._added, self._removed = {}, {}
        return changes

    def report(self) -> list[BlockReport]:
        """Every block that is not free."""
        return [
            BlockReport(i, b.generation, (b.quarantined_for,), "quarantined")
            if b.quarantined_for is not None
            else BlockReport(i, b.generation, tuple(b.owners), "owned")
            for i, b in enumerate(self._blocks)
            if b.owners or b.quarantined_for is not None
        ]

    def check_integrity(self) -> None:
        """Raise :class:`BlockPoolError` unless every block is in exactly one state and every name is true."""
        for block_id, block in enumerate(self._blocks):
            states = (block_id in self._free) + bool(block.owners) + (block.quarantined_for is not None)
            if states != 1:
                raise BlockPoolError(f"block {block_id} is in {states} states: {block}")
            if block.name is not None and self._by_name.get(block.name) != block_id:
                raise BlockPoolError(f"block {block_id} carries a name the index does not know")
            if block.name is not None and block.quarantined_for is not None:
                raise BlockPoolError(f"block {block_id} can be found by name, but bytes may still land in it")
        for name, block_id in self._by_name.items():
            if self._blocks[block_id].name != name:
                raise BlockPoolError(f"the index names block {block_id} wrongly")
        if self._num_quarantined != sum(block.quarantined_for is not None for block in self._blocks):
            raise BlockPoolError("the count of quarantined blocks is wrong")

    def _own(self, block_id: int, owner: str) -> None:
        owners = self._blocks[block_id].owners
        if owner in owners:
            raise BlockPoolError(f"{owner} already owns block {block_id}")
        owners[owner] = None

    def _disown(self, block_id: int, owner: str) -> None:
        if self._blocks[block_id].owners.pop(owner, owner) is not None:
            raise BlockPoolError(f"{owner} does not own block {block_id}: double free or foreign release")

    def _make_free(self, block_id: int) -> None:
        # A nameless block holds nothing worth keeping: it is used up before any cached prefix is evicted.
        self._free[block_id] = None
        if self._blocks[block_id].name is None:
            self._free.move_to_end(block_id, last=False)

    def _forget_name(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.name is not None:
            del self._by_name[block.name]
            if block.name in self._added:
                del self._added[block.name]
            else:
                self._removed[block.name] = None
            block.name = None
