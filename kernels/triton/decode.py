"""Attention of single tokens over the paged cache: each sequence's keys are split between programs (split-KV).

A split is always ``SPLIT_TOKENS`` positions and splits are merged in their order, so a row's bits depend on its own
sequence only: not on the batch, nor on how many programs share the splits (Flash-Decoding, Dao et al. 2023, chooses
the number of splits by the batch instead).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FUSED, padded, require, require_attention, widens
from kernels.triton.tile import attend_tile

SPLIT_TOKENS: Final = 256
_PROGRAMS: Final = 2048  # several for each of the 108 to 304 compute units of the targets


# Lengths that differ between deployments do not make builds of their own: the report covers those that run.
@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def _decode_kernel(
    q: tl.tensor,
    pool: tl.tensor,
    partial_values: tl.tensor,
    partial_sums: tl.tensor,
    rows: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    q_stride: int,
    table_stride: int,
    layer_offset: int,
    block_stride: int,
    max_splits: int,
    scale: float,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    kv_head, part = tl.program_id(1) // tl.cdiv(GROUP, ROWS), tl.program_id(1) % tl.cdiv(GROUP, ROWS)
    context_len = tl.load(context_lens + sequence)
    member, dims = part * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    head = kv_head * GROUP + member
    mask = (member < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    token = tl.load(rows + sequence).to(tl.int64)
    tile = tl.load(q + token * q_stride + head[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    if WIDE:
        tile = tile.to(tl.float32)
    last_keys = tl.full((ROWS,), context_len - 1, tl.int32)
    cache = pool + layer_offset + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = block_tables + sequence * table_stride
    for split in tl.range(tl.program_id(2), tl.cdiv(context_len, SPLIT), tl.num_programs(2)):
        end = tl.minimum(context_len, (split + 1) * SPLIT)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIMS), tl.float32)
        for start in tl.range(split * SPLIT, end, KEYS):
            keys = start + tl.arange(0, KEYS)
            peak, total, acc = attend_tile(
                tile, last_keys, peak, total, acc, keys, end, cache, table, block_stride, scale,
                KV_HEADS, BLOCK_SIZE, HEAD_DIM, DIMS, WIDE,
            )  # fmt: skip
        place = (sequence * KV_HEADS * GROUP + head) * max_splits + split
        tl.store(partial_values + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(partial_sums + place * 2, peak, mask=member < GROUP)
        tl.store(partial_sums + place * 2 + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["max_splits"])
def _reduce_kernel(
    out: tl.tensor,
    partial_values: tl.tensor,
    partial_sums: tl.tensor,
    rows: tl.tensor,
    context_lens: tl.tensor,
    out_stride: int,
    max_splits: int,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (sequence * tl.num_programs(1) + head) * max_splits
    dims = tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    context_len = tl.load(context_lens + sequence)
    if context_len <= 0:
        return
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros((DIMS,), tl.float32)
    for split in tl.range(0, tl.cdiv(context_len, SPLIT)):
        split_peak = tl.load(partial_sums + (first + split) * 2)
        split_total = tl.load(partial_sums + (first + split) * 2 + 1)
        split_acc = tl.load(partial_values + (first + split) * HEAD_DIM + dims, mask=inside, other=0.0)
        higher = tl.maximum(peak, split_peak)
        fade, gain = tl.exp2(peak - higher), tl.exp2(split_peak - higher)
        total = total * fade + split_total * gain
        acc = acc * fade + split_acc * gain
        peak = higher
    target = out + tl.load(rows + sequence).to(tl.int64) * out_stride + head * HEAD_DIM
    tl.store(target + dims, (acc / total).to(out.dtype.element_ty), mask=inside)


class DecodeWorkspace:
    """Room for the partial results of `paged_decode`, one for all layers; belongs to whoever calls it.

    float32, ``max_sequences * num_heads * ceil(max_context / SPLIT_TOKENS) * (head_dim + 2)`` elements: 17 MB for 32
    sequences of 8,192 positions with 32 heads of 128. Nothing is read before it was written.
    """

    def __init__(
        self, max_sequences: int, num_heads: int, head_dim: int, max_context: int, device: torch.device | str
    ) -> None:
        """``max_context`` is in tokens. Allocates on ``device``."""
        self.max_context = max_context
        splits = triton.cdiv(max_context, SPLIT_TOKENS)
        shape = (max_sequences, num_heads, splits)
        self.values = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(*shape, 2, dtype=torch.float32, device=device)


def paged_decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    rows: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """Attention of one token of each sequence: ``out = softmax(q kᵀ / sqrt(head_dim)) v``.

    Row ``rows[i]`` of ``q`` is the last of ``context_lens[i]`` positions, all stored. A length of 0 marks a padding
    entry, whose row of ``out`` is left alone, as are rows of no sequence.

    ``q``, ``out``: ``[num_tokens, num_heads, head_dim]``, rows may be apart; ``pool``: as `store_kv`; ``rows``,
    ``context_lens``: int32 ``[num_sequences]``; ``block_tables``: int32 ``[num_sequences, max_blocks]``. Raises
    ValueError for wrong shapes and types and for a workspace that is too small; what the index tensors hold is not
    checked (it is on the device): no length may be over ``workspace.max_context``.
    """
    num_heads, num_kv_heads, block_size, head_dim = require_attention(
        q, pool, layer, block_tables, out, rows=rows, context_lens=context_lens
    )
    num_sequences, values = block_tables.shape[0], workspace.values
    fits = values.shape[0] >= num_sequences and values.shape[1::2] == (num_heads, head_dim)
    require(fits, f"a workspace of shape {list(values.shape)} does not fit")
    if num_sequences == 0:
        return
    max_splits = values.shape[2]
    group = num_heads // num_kv_heads
    tile_rows = min(padded(group), _tile_rows(q.dtype))
    head_tiles = num_kv_heads * triton.cdiv(group, tile_rows)
    programs = max(1, min(max_splits, _PROGRAMS // (num_sequences * head_tiles)))
    _decode_kernel[(num_sequences, head_tiles, programs)](
        q,
        pool,
        values,
        workspace.sums,
        rows,
        context_lens,
        block_tables,
        q.stride(0),
        block_tables.stride(0),
        layer * pool.stride(1),
        pool.stride(0),
        max_splits,
        head_dim**-0.5 * math.log2(math.e),
        GROUP=group,
        KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        ROWS=tile_rows,
        KEYS=_tile_keys(q.dtype),
        SPLIT=SPLIT_TOKENS,
        WIDE=widens(q.dtype),
        num_warps=_warps(q.dtype, head_dim),
        **FUSED,
    )
    _merge_splits(workspace, rows, context_lens, out)


def _merge_splits(workspace: DecodeWorkspace, rows: Tensor, context_lens: Tensor, out: Tensor) -> None:
    num_heads, max_splits, head_dim = workspace.values.shape[1:]
    _reduce_kernel[(context_lens.shape[0], num_heads)](
        out,
        workspace.values,
        workspace.sums,
        rows,
        context_lens,
        out.stride(0),
        max_splits,
        HEAD_DIM=head_dim,
        DIMS=padded(head_dim),
        SPLIT=SPLIT_TOKENS,
        num_warps=1,
        **FUSED,
    )


def _tile_keys(dtype: torch.dtype) -> int:
    # Divides SPLIT_TOKENS. Float32 products live in registers: 64 keys spilled on every target, and a head of 128
    # took more than the 64 KiB of shared memory that gfx942 has.
    return 32 if dtype == torch.float32 else 64


def _tile_rows(dtype: torch.dtype) -> int:
    # More heads than this on one KV head are several programs. 32 rows of float32 spilled on sm_90.
    return 16 if dtype == torch.float32 else 32


def _warps(dtype: torch.dtype, head_dim: int) -> int:
    return 8 if dtype == torch.float32 and head_dim > 64 else 4
