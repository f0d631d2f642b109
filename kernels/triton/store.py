"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import (
    FUSED,
    next_power_of_2,
    require,
    require_heads,
    require_pool,
    require_tensor,
    row_warps,
)


@triton.jit
def _store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    pool: tl.tensor,
    slots: tl.tensor,
    k_stride: int,
    v_stride: int,
    layer_offset: int,
    block_stride: int,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    columns = tl.arange(0, BLOCK)
    inside = columns < KV_HEADS * HEAD_DIM
    head, dim = columns // HEAD_DIM, columns % HEAD_DIM
    # A pool of 2 GiB has more elements than an int32 counts: the block's offset stays in the slot's int64.
    start = (slot // BLOCK_SIZE) * block_stride + layer_offset + (slot % BLOCK_SIZE) * HEAD_DIM
    target = pool + start + head * (BLOCK_SIZE * HEAD_DIM) + dim
    tl.store(target, tl.load(k + token * k_stride + columns, mask=inside), mask=inside)
    target += KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(target, tl.load(v + token * v_stride + columns, mask=inside), mask=inside)


def store_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write keys and values of one layer into their slots: ``pool[slot / block_size, layer, :, :, slot % block_size]``.

    ``pool``: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; ``k``, ``v``: of its type,
    ``[num_tokens, num_kv_heads, head_dim]``, rows may be apart; ``slots``: int64 ``[num_tokens]``, all different. A
    negative slot is a padding row of a graph's batch and is not written. Slots are not checked against
    ``num_blocks`` (they are on the device). Raises ValueError for other shapes and types.
    """
    num_kv_heads, block_size, head_dim = require_pool(pool, layer, k.dtype)
    num_tokens = slots.shape[0]
    require_tensor("slots", slots, (num_tokens,), torch.int64)
    for name, rows in (("k", k), ("v", v)):
        found = require_heads(name, rows, num_tokens, head_dim, pool.dtype)
        require(found == num_kv_heads, f"{name} has {found} heads, the pool {num_kv_heads}")
    if num_tokens == 0:
        return
    block = next_power_of_2(num_kv_heads * head_dim)
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        pool,
        slots,
        k.stride(0),
        v.stride(0),
        layer * pool.stride(1),
        pool.stride(0),
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=row_warps(block),
        **FUSED,
    )
