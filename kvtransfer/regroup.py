"""Blocks for a receiver whose blocks have another size: cut out of ours by token offset, before they are sent.

Only the number of tokens in a block may differ; everything else is in the fingerprint. A block of the receiver's size
is put together in memory of its own on the transport's thread, so the receiver sees what it always sees: its own
blocks, each whole, with its own digest and generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import LayoutError, TicketError
from kvtransfer.layout import DIM_MAJOR, ITEM_BYTES, BlockLayout

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

# Elements are only moved: what type they are of does not matter, how wide they are does.
_WORDS: Final[dict[int, npt.DTypeLike]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class TokenRun:
    """``num_tokens`` tokens that lie one after the other, from slot ``first_slot`` of the first of ``block_ids`` on."""

    block_ids: tuple[int, ...]
    first_slot: int
    num_tokens: int


# What is sent into one block of the receiver: a block of ours, or tokens of several.
Source = int | TokenRun


def run_of(block_table: Sequence[int], first_token: int, end_token: int, block_size: int) -> TokenRun:
    """Tokens ``[first_token, end_token)`` of a sequence whose blocks of ``block_size`` tokens are ``block_table``."""
    first, end = first_token // block_size, -(-end_token // block_size)
    return TokenRun(tuple(block_table[first:end]), first_token % block_size, end_token - first_token)


def source_blocks(sources: Iterable[Source]) -> list[int]:
    """Every block of ours that these read, once each."""
    found = (source.block_ids if isinstance(source, TokenRun) else (source,) for source in sources)
    return list(dict.fromkeys(block_id for block_ids in found for block_id in block_ids))


class Regrouper:
    """Reads one pool, ``[num_blocks, block_bytes]``, laid out as ``layout``. Keeps nothing; the pool is borrowed."""

    def __init__(self, pool: Bytes, layout: BlockLayout) -> None:
        """Raises `LayoutError` if the pool does not have such blocks."""
        if pool.shape[1] != layout.block_bytes:
            raise LayoutError(f"a pool with blocks of {pool.shape[1]} bytes is not laid out as {layout}")
        self._layout = layout
        self._num_blocks = len(pool)
        self._keys, self._values = _views(pool, layout)

    def block_size(self, block_bytes: int) -> int | None:
        """Tokens in a block of that many bytes, or None if that is no whole number of them."""
        size, rest = divmod(block_bytes, self._layout.token_bytes)
        return None if rest else size

    def check(self, run: TokenRun, block_bytes: int) -> None:
        """Raises `TicketError` for a run that is not in the pool or does not fit into such a block."""
        size, room = self._layout.block_size, self.block_size(block_bytes)
        if room is None or not 0 < run.num_tokens <= room:
            raise TicketError(f"{run.num_tokens} tokens do not fit a block of {block_bytes} bytes")
        last = run.first_slot + run.num_tokens - 1
        if not 0 <= run.first_slot < size or last // size + 1 != len(run.block_ids):
            raise TicketError(f"{run} does not match blocks of {size} tokens")
        if not all(0 <= block_id < self._num_blocks for block_id in run.block_ids):
            raise TicketError(f"{run} is outside a pool of {self._num_blocks}")

    def gather(self, run: TokenRun, block_bytes: int) -> Bytes:
        """One block of ``block_bytes``: the tokens of a checked ``run`` from its first slot on, zeros behind them."""
        size = self._layout.block_size
        block: Bytes = np.zeros(block_bytes, np.uint8)
        keys, values = _views(
            block[np.newaxis], replace(self._layout, block_size=block_bytes // self._layout.token_bytes)
        )
        done, slot = 0, run.first_slot
        for block_id in run.block_ids:
            count = min(size - slot, run.num_tokens - done)
            keys[0, :, :, done : done + count] = self._keys[block_id, :, :, slot : slot + count]
            values[0, :, :, done : done + count] = self._values[block_id, :, :, slot : slot + count]
            done, slot = done + count, 0
        return block


def _views(blocks: Bytes, layout: BlockLayout) -> tuple[Words, Words]:
    """Keys and values of the blocks, each ``[num_blocks, num_layers, num_kv_heads, block_size, head_dim]``."""
    word = _WORDS[ITEM_BYTES[layout.dtype]]
    heads = (len(blocks), layout.num_layers, layout.num_kv_heads)
    pool = blocks.view(word).reshape(len(blocks), *layout.block_shape)
    keys, values = pool[:, :, 0], pool[:, :, 1]
    if layout.key_order == DIM_MAJOR:
        flat = blocks.view(word).reshape(len(blocks), layout.num_layers, 2, layout.num_kv_heads, -1)[:, :, 0]
        keys = flat.reshape(*heads, layout.head_dim, layout.block_size).swapaxes(-1, -2)
    return keys, values
