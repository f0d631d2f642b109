"""Blocks of the KV pool to and from a contiguous staging buffer, the form in which they cross a wire."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FUSED, require, require_tensor

_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)
_WORDS_A_PROGRAM: Final = 2048


@triton.jit
def _copy_blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    block_ids: tl.tensor,
    words: int,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    block_id = tl.load(block_ids + index)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < words
    if GATHER:
        source += block_id * words
        target += index * words
    else:
        source += index * words
        target += block_id * words
    tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def gather_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """``staging[i] = pool[block_ids[i]]``, bit for bit.

    ``pool``: ``[num_blocks, ...]``; ``staging``: ``[num_ids, ...]`` of the pool's type and block shape; both are
    contiguous. ``block_ids``: int64 ``[num_ids]``, not checked against ``num_blocks`` (they are on the device).
    Raises ValueError for other shapes and types.
    """
    _copy(pool, block_ids, staging, gather=True)


def scatter_blocks(staging: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """``pool[block_ids[i]] = staging[i]``, bit for bit; arguments as `gather_blocks`, ids all different."""
    _copy(pool, block_ids, staging, gather=False)


def _copy(pool: Tensor, block_ids: Tensor, staging: Tensor, *, gather: bool) -> None:
    num_ids = block_ids.shape[0]
    require_tensor("block_ids", block_ids, (num_ids,), torch.int64)
    require_tensor("staging", staging, (num_ids, *pool.shape[1:]), pool.dtype)
    require(pool.is_contiguous() and staging.is_contiguous(), "pool and staging must be contiguous")
    if staging.numel() == 0:
        return
    pool_words, staging_words = _as_words(pool), _as_words(staging)
    num_words = pool_words.shape[1]
    _copy_blocks_kernel[(num_ids, triton.cdiv(num_words, _WORDS_A_PROGRAM))](
        pool_words if gather else staging_words,
        staging_words if gather else pool_words,
        block_ids,
        num_words,
        GATHER=gather,
        BLOCK=_WORDS_A_PROGRAM,
        num_warps=8,
        **FUSED,
    )


def _as_words(blocks: Tensor) -> Tensor:
    """``[num_blocks, num_words]`` of the widest integer that divides a block: a copy has no business with floats."""
    flat = blocks.view(blocks.shape[0], -1).view(torch.uint8)
    return flat.view(next(word for word in _WORDS if flat.shape[1] % word.itemsize == 0))
