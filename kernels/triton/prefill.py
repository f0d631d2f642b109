"""Attention of prompt chunks over the paged cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FUSED, padded, require_attention, widens
from kernels.triton.tile import attend_tile


# The table's length differs between deployments and does not make a build of its own.
@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q: tl.tensor,
    pool: tl.tensor,
    out: tl.tensor,
    first_rows: tl.tensor,
    row_counts: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    q_stride: int,
    out_stride: int,
    table_stride: int,
    layer_offset: int,
    block_stride: int,
    scale: float,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    # The last tiles look furthest back: started first, they do not trail behind.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    num_rows = tl.load(row_counts + sequence)
    if first >= num_rows * GROUP:
        return
    # The heads that share a KV head become rows, token by token, so that no key is loaded twice.
    row = first + tl.arange(0, ROWS)
    inside = row < num_rows * GROUP
    token = (tl.load(first_rows + sequence) + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    dims = tl.arange(0, DIMS)
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    tile = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    if WIDE:
        tile = tile.to(tl.float32)

    context_len = tl.load(context_lens + sequence)
    last_keys = context_len - num_rows + row // GROUP
    end = tl.minimum(context_len, context_len - num_rows + (first + ROWS - 1) // GROUP + 1)
    cache = pool + layer_offset + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = block_tables + sequence.to(tl.int64) * table_stride
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    for start in tl.range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        peak, total, acc = attend_tile(
            tile, last_keys, peak, total, acc, keys, end, cache, table, block_stride, scale,
            KV_HEADS, BLOCK_SIZE, HEAD_DIM, DIMS, WIDE,
        )  # fmt: skip
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * out_stride + head[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)


@dataclass(frozen=True, slots=True)
class _Tiles:
    rows: int
    keys: int
    warps: int


def _tiles(dtype: torch.dtype, head_dim: int) -> _Tiles:
    """Tile sizes that compile without spills on every target; they never depend on the batch.

    Float32 products are not made by tensor cores: 64 x 64 tiles of them spilled 10 KB and took ptxas 98 s. Heads of 128
    with 64 keys spilled 48 bytes on sm_80.
    """
    if dtype == torch.float32:
        return _Tiles(32, 32, 4 if head_dim <= 64 else 8)
    return _Tiles(64, 64, 4) if head_dim <= 64 else _Tiles(128, 32, 8)


def paged_prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    first_rows: Tensor,
    row_counts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    max_rows: int,
    out: Tensor,
) -> None:
    """Causal attention of chunks of several sequences: ``out = softmax(q kᵀ / sqrt(head_dim) + causal) v``.

    Chunk ``i`` is rows ``first_rows[i] .. + row_counts[i] - 1`` of ``q``, the last ``row_counts[i]`` of its sequence's
    ``context_lens[i]`` positions, all of whose keys and values are stored. Rows of no chunk are left alone in ``out``.

    ``q``, ``out``: ``[num_tokens, num_heads, head_dim]``, rows may be apart; ``pool``: as `store_kv`; ``first_rows``,
    ``row_counts``, ``context_lens``: int32 ``[num_chunks]``; ``block_tables``: int32 ``[num_chunks, max_blocks]``,
    entry ``j`` being the block of positions ``j * block_size`` and on; ``max_rows``: at least the largest row count.
    A row's result does not depend on the other chunks, nor on where its own chunk begins. Raises ValueError for
    wrong shapes and types; what the index tensors hold is not checked (it is on the device).
    """
    num_heads, num_kv_heads, block_size, head_dim = require_attention(
        q, pool, layer, block_tables, out, first_rows=first_rows, row_counts=row_counts, context_lens=context_lens
    )
    num_chunks = block_tables.shape[0]
    if num_chunks == 0 or max_rows <= 0:
        return
    group = num_heads // num_kv_heads
    tiles = _tiles(q.dtype, head_dim)
    _prefill_kernel[(triton.cdiv(max_rows * group, tiles.rows), num_kv_heads, num_chunks)](
        q,
        pool,
        out,
        first_rows,
        row_counts,
        context_lens,
        block_tables,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        layer * pool.stride(1),
        pool.stride(0),
        head_dim**-0.5 * math.log2(math.e),
        GROUP=group,
        KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        WIDE=widens(q.dtype),
        num_warps=tiles.warps,
        **FUSED,
    )
