"""RMS norm of rows, with the residual addition before it fused in."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FLOAT_DTYPES, FUSED, next_power_of_2, require, require_tensor, row_warps

_MAX_SIZE: Final = 16384  # one program holds a whole row in registers


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_strides: tl.tensor,
    residual_stride: int,
    out_strides: tl.tensor,
    size: int,
    eps: float,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wide = tl.load(x + row * x_strides[0] + part * x_strides[1] + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if ADD:
        sums = residual + row * residual_stride + columns
        total = (wide + tl.load(sums, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(sums, total, mask=inside)
        # The norm sees the sum as it is stored, as it would without the fusion.
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scaled = (wide * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_strides[0] + part * out_strides[1] + columns, (scaled * gain).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """``out = x / sqrt(mean(x²) + eps) * weight`` over the last dimension, summed in float32.

    ``x``, ``out``: ``[num_rows, size]`` or ``[num_tokens, num_heads, size]``, dense in the last dimension only, of one
    type; ``out`` may be ``x``. ``weight``: ``[size]`` of that type or float32. Rounds where
    `kernels.reference.rms_norm` rounds. Raises ValueError for other shapes and types.
    """
    _launch(x, out, weight, eps, out, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """``residual += x``, then ``out = rms_norm(residual)``.

    ``x``, ``residual``, ``out``: ``[num_rows, size]``; ``out`` may be ``x``. Otherwise as `rms_norm`.
    """
    require(x.dim() == 2, f"x has {x.dim()} dimensions, not 2")
    require_tensor("residual", residual, tuple(x.shape), x.dtype)
    _launch(x, residual, weight, eps, out, add=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, *, add: bool) -> None:
    require(x.dim() in (2, 3), f"x has {x.dim()} dimensions, not 2 or 3")
    size = x.shape[-1]
    require(0 < size <= _MAX_SIZE, f"rows of {size} are not within 1 .. {_MAX_SIZE}")
    require_tensor("x", x, tuple(x.shape), *FLOAT_DTYPES)
    require_tensor("out", out, tuple(x.shape), x.dtype)
    require_tensor("weight", weight, (size,), x.dtype, torch.float32)
    if x.numel() == 0:
        return
    block = next_power_of_2(size)
    _rms_norm_kernel[(x.shape[0], x.shape[1] if x.dim() == 3 else 1)](
        x,
        residual,
        weight,
        out,
        _strides(x),
        residual.stride(0),
        _strides(out),
        size,
        eps,
        ADD=add,
        BLOCK=block,
        num_warps=row_warps(block),
        **FUSED,
    )


def _strides(x: Tensor) -> tuple[int, int]:
    return (x.stride(0), x.stride(1) if x.dim() == 3 else 0)
