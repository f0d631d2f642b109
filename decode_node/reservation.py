"""How many blocks a request needs here, and whether they can be promised. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ContextLengthError, InvalidRequestError
from cluster.request import SamplingParams
from cluster.wire import Reserve
from engine.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """``max_num_seqs`` bounds the sequences a node holds at once, arriving or running: each choice is one."""

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
    """Why not; ``retry_after_s`` is None if it can never fit here: ``code`` says what kind of error that is."""

    reason: str
    retry_after_s: float | None
    code: str = ContextLengthError.code


FULL_RETRY_S = 0.25


def stored_len(prompt_len: int, sampling: SamplingParams, num_emitted: int) -> int:
    """Tokens of one choice that are stored at its end. The last one never is: nothing attends to it."""
    return prompt_len + max(0, sampling.max_tokens - num_emitted - 1)


def growth_blocks(prompt_len: int, total_len: int, num_choices: int, block_size: int) -> int:
    """Blocks that ``num_choices`` answers of ``total_len`` stored tokens may take beyond the prompt's own.

    The prompt's full blocks are there once. Its partial last block is written by one choice and copied for each other.
    """
    if total_len <= prompt_len or not num_choices:
        return 0
    num_full, prompt_blocks = prompt_len // block_size, -(-prompt_len // block_size)
    return num_choices * (-(-total_len // block_size) - num_full) - (prompt_blocks - num_full)


def find_room(
    reserve: Reserve, settings: DecodeSettings, pool: BlockPool, *, num_held: int, num_promised: int
) -> Room | NoRoom:
    """Decide on ``reserve`` while ``num_held`` sequences are here and ``num_promised`` blocks are promised to them."""
    size, num_choices = settings.block_size, reserve.sampling.num_choices
    num_full = reserve.prompt_len // size
    if reserve.prompt_len < 1 or len(reserve.block_hashes) != num_full:
        return NoRoom("the block hashes do not match the prompt", None)
    if num_choices > 1 and reserve.num_emitted:
        return NoRoom("several choices cannot go on from the tokens of one", None)
    total_len = stored_len(reserve.prompt_len, reserve.sampling, reserve.num_emitted)
    if total_len > settings.max_model_len:
        return NoRoom("prompt and max_tokens exceed the model's context", None)
    prompt_blocks = -(-reserve.prompt_len // size)
    growth = growth_blocks(reserve.prompt_len, total_len, num_choices, size)
    if prompt_blocks + growth > settings.num_blocks:
        return NoRoom("prompt and max_tokens exceed the decode node's whole KV pool", None)
    if num_choices > settings.max_num_seqs:
        reason = f"{num_choices} choices are over the decode node's {settings.max_num_seqs} sequence slots"
        return NoRoom(reason, None, InvalidRequestError.code)
    if num_held + num_choices > settings.max_num_seqs:
        return NoRoom("all sequence slots are in use", FULL_RETRY_S)
    shared = tuple(pool.match(reserve.block_hashes))
    taken = pool.num_free_among(shared) + prompt_blocks + growth - len(shared)
    if taken > pool.num_free - num_promised:
        return NoRoom("not enough free KV blocks", FULL_RETRY_S)
    return Room(shared, num_missing=prompt_blocks - len(shared), growth=growth)
