"""The launcher calls whose kernels are built ahead of time: each launcher, with shapes of the models it will serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels.triton.activation import silu_mul
from kernels.triton.blocks import gather_blocks, scatter_blocks
from kernels.triton.decode import DecodeWorkspace, paged_decode
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.prefill import paged_prefill
from kernels.triton.rope import apply_rope
from kernels.triton.store import store_kv

_TOKENS: Final = 4
_BLOCK_SIZE: Final = 16
_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a launcher. ``variant`` tells apart the builds of one kernel."""

    variant: str
    launch: Callable[[], None]


def calls(*, all_types: bool) -> list[Call]:
    """Every launcher in bfloat16; with ``all_types`` also in float16 and float32."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if all_types else (torch.bfloat16,)
    block_ids, (pool, staging) = torch.arange(2), _zeros(torch.bfloat16, 2, 2, 2, 2, 3, _BLOCK_SIZE, 64)
    found = [
        Call("gather", partial(gather_blocks, pool, block_ids, staging)),
        Call("scatter", partial(scatter_blocks, staging, block_ids, pool)),
    ]
    for dtype in dtypes:
        found += _row_calls(dtype)
        # Grouped, multi-query and multi-head attention: heads and the KV heads they share.
        shapes = [(64, 9, 3), (128, 32, 8)]
        if dtype != torch.float16:  # whose builds are bfloat16's
            shapes += [(128, 32, 1)]
        if dtype == torch.bfloat16:
            shapes += [(64, 8, 8), (128, 64, 8)]
        for head_dim, num_heads, num_kv_heads in shapes:
            found += _attention_calls(dtype, head_dim, num_heads, num_kv_heads)
    return found


def _row_calls(dtype: torch.dtype) -> Iterator[Call]:
    name = _NAMES[dtype]
    for size in (576, 4096, 16384):
        x, weight = _zeros(dtype, _TOKENS, size), torch.zeros(size)  # float32, as models are loaded
        yield Call(f"{name} {size}", partial(rms_norm, x, weight, 1e-5, x))
        yield Call(f"{name} {size} add", partial(add_rms_norm, x, torch.zeros_like(x), weight, 1e-5, x))
    for size in (1536, 14336):
        yield Call(f"{name} {size}", partial(silu_mul, _zeros(dtype, _TOKENS, 2 * size), _zeros(dtype, _TOKENS, size)))


def _attention_calls(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int) -> Iterator[Call]:
    variant = f"{_NAMES[dtype]} D{head_dim} {num_heads}/{num_kv_heads}"
    qkv = _zeros(dtype, _TOKENS, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    out = _zeros(dtype, _TOKENS, num_heads, head_dim)
    pool = _zeros(dtype, 2, 2, 2, num_kv_heads, _BLOCK_SIZE, head_dim)
    positions, slots = torch.arange(_TOKENS), torch.arange(_TOKENS)
    angles = torch.zeros(64, head_dim // 2)
    # Table rows of 512 blocks, as of a model of 8,192 positions.
    tables = torch.zeros(_TOKENS, 512, dtype=torch.int32)
    ones = torch.ones(_TOKENS, dtype=torch.int32)
    workspace = DecodeWorkspace(_TOKENS, num_heads, head_dim, 512 * _BLOCK_SIZE, "cpu")
    yield Call(variant, partial(rms_norm, q, torch.zeros(head_dim), 1e-6, q))
    yield Call(variant, partial(apply_rope, q, k, positions, angles, angles, q, k))
    yield Call(variant, partial(store_kv, pool, 1, k, v, slots))
    yield Call(variant, partial(paged_prefill, q, pool, 1, ones, ones, ones, tables, 1, out))
    yield Call(variant, partial(paged_decode, q, pool, 1, ones, ones, tables, workspace, out))


def _zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)
