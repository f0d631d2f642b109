"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FLOAT_DTYPES, FUSED, next_power_of_2, require, require_heads, require_tensor


@triton.jit
def _rotate(
    source: tl.tensor,
    target: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_heads: int,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """One token's heads: ``(a, b) -> (a cos - b sin, b cos + a sin)`` for the pairs ``(i, i + HALF)``."""
    heads, pairs = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    inside = (heads < num_heads) & (pairs < HALF)
    offsets = heads * (2 * HALF) + pairs
    first = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target + offsets, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(target + offsets + HALF, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    out_q: tl.tensor,
    out_k: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_stride: int,
    k_stride: int,
    out_q_stride: int,
    out_k_stride: int,
    num_heads: int,
    num_kv_heads: int,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PAIRS)[None, :]
    angles = tl.load(positions + token) * HALF + pairs
    token_cos = tl.load(cos + angles, mask=pairs < HALF, other=0.0)
    token_sin = tl.load(sin + angles, mask=pairs < HALF, other=0.0)
    if tl.program_id(1) == 0:
        source, target = q + token * q_stride, out_q + token * out_q_stride
        _rotate(source, target, token_cos, token_sin, num_heads, HALF, HEADS, PAIRS)
    else:
        source, target = k + token * k_stride, out_k + token * out_k_stride
        _rotate(source, target, token_cos, token_sin, num_kv_heads, HALF, KV_HEADS, PAIRS)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, out_q: Tensor, out_k: Tensor) -> None:
    """Rotate queries and keys by their positions, as `kernels.reference.apply_rope` but in float32 throughout.

    ``q``, ``out_q``: ``[num_tokens, num_heads, head_dim]``; ``k``, ``out_k``: ``[num_tokens, num_kv_heads, head_dim]``;
    rows may be apart, and an output may be its input. ``positions``: int64 ``[num_tokens]``; ``cos``, ``sin``: float32
    ``[num_positions, head_dim / 2]``. A position is not checked against ``num_positions`` (it is on the device).
    Raises ValueError for other shapes and types.
    """
    num_tokens, head_dim = positions.shape[0], q.shape[-1]
    require(q.dtype in FLOAT_DTYPES, f"no kernel for {q.dtype}")
    require(head_dim % 2 == 0, f"a head of {head_dim} has no pairs")
    num_heads = require_heads("q", q, num_tokens, head_dim, q.dtype)
    num_kv_heads = require_heads("k", k, num_tokens, head_dim, q.dtype)
    require(require_heads("out_q", out_q, num_tokens, head_dim, q.dtype) == num_heads, "out_q is not like q")
    require(require_heads("out_k", out_k, num_tokens, head_dim, q.dtype) == num_kv_heads, "out_k is not like k")
    require_tensor("positions", positions, (num_tokens,), torch.int64)
    for name, table in (("cos", cos), ("sin", sin)):
        require_tensor(name, table, (cos.shape[0], head_dim // 2), torch.float32)
        require(table.is_contiguous(), f"{name} is not contiguous")
    if num_tokens == 0:
        return
    heads, pairs = next_power_of_2(num_heads), next_power_of_2(head_dim // 2)
    _rope_kernel[(num_tokens, 2)](
        q,
        k,
        out_q,
        out_k,
        positions,
        cos,
        sin,
        q.stride(0),
        k.stride(0),
        out_q.stride(0),
        out_k.stride(0),
        num_heads,
        num_kv_heads,
        HALF=head_dim // 2,
        HEADS=heads,
        KV_HEADS=next_power_of_2(num_kv_heads),
        PAIRS=pairs,
        num_warps=min(8, max(1, heads * pairs // 256)),
        **FUSED,
    )
