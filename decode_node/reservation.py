"""How many blocks a request needs here, and whether they can be promised. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.wire import Reserve
from engine.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """``max_num_seqs`` bounds the requests a node holds at once, arriving or running."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Room:
    """What a grant takes: ``shared`` blocks found by name, ``num_missing`` to be received, ``growth`` promised."""

    shared: tuple[int, ...]
    num_missing: int
    growth: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why not; ``retry_after_s`` is None if it can never fit here."""

    reason: str
    retry_after_s: float | None


FULL_RETRY_S = 0.25


def find_room(
    reserve: Reserve, settings: DecodeSettings, pool: BlockPool, *, num_held: int, num_promised: int
) -> Room | NoRoom:
    """Decide on ``reserve`` while ``num_held`` requests are here and ``num_promised`` blocks are promised to them."""
    size = settings.block_size
    num_full = reserve.prompt_len // size
    if reserve.prompt_len < 1 or len(reserve.block_hashes) != num_full:
        return NoRoom("the block hashes do not match the prompt", None)
    # The KV of the last token is never stored: nothing attends to it.
    total_len = reserve.prompt_len + max(0, reserve.sampling.max_tokens - reserve.num_emitted - 1)
    if total_len > settings.max_model_len:
        return NoRoom("prompt and max_tokens exceed the model's context", None)
    total_blocks = -(-total_len // size)
    if total_blocks > settings.num_blocks:
        return NoRoom("prompt and max_tokens exceed the decode node's whole KV pool", None)
    if num_held >= settings.max_num_seqs:
        return NoRoom("all sequence slots are in use", FULL_RETRY_S)
    shared = tuple(pool.match(reserve.block_hashes))
    prompt_blocks = -(-reserve.prompt_len // size)
    taken = pool.num_free_among(shared) + total_blocks - len(shared)
    if taken > pool.num_free - num_promised:
        return NoRoom("not enough free KV blocks", FULL_RETRY_S)
    return Room(shared, num_missing=prompt_blocks - len(shared), growth=total_blocks - prompt_blocks)
