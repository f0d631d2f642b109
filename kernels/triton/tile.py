"""The step both attention kernels repeat: one tile of queries meets one tile of cached keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    q: tl.tensor,
    last_keys: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    keys: tl.tensor,
    end: tl.tensor,
    cache: tl.tensor,
    table: tl.tensor,
    block_stride: int,
    scale: float,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax: with ``s = q kᵀ scale``, ``peak' = max(peak, max s)`` and ``f = 2^(peak - peak')``,
    ``total' = total f + sum 2^(s - peak')`` and ``acc' = acc f + 2^(s - peak') v``. Returns the three.

    ``q``: ``[rows, DIMS]``; row ``i`` may look at keys up to ``last_keys[i]``; ``keys``: ``[num_keys]`` positions, of
    which those from ``end`` on are not read. ``cache`` points at the layer's keys of one KV head in block 0;
    ``table`` at the sequence's block ids. ``scale`` includes ``log2(e)``. A row's first tile must hold a key it sees.

    There is one path for whole and for partly visible tiles: two would be contracted differently by the compiler,
    and a row's bits would depend on where its chunk began. An invisible key adds an exact zero.
    """
    dims = tl.arange(0, DIMS)
    stored = keys < end
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
    offsets = blocks * block_stride + (keys % BLOCK_SIZE) * HEAD_DIM
    # What was never stored may be NaN, which zero weights would not hide: it is not read.
    k = tl.load(cache + offsets[None, :] + dims[:, None], mask=stored[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
    values = cache + KV_HEADS * BLOCK_SIZE * HEAD_DIM
    v = tl.load(values + offsets[:, None] + dims[None, :], mask=stored[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    scores = tl.where(keys[None, :] <= last_keys[:, None], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    fade = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc
