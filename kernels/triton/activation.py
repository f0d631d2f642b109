"""The gated activation of Llama's feed-forward layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import FLOAT_DTYPES, FUSED, next_power_of_2, require, require_tensor, row_warps


@triton.jit
def _silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, gate_up_stride: int, out_stride: int, size: int, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    source = gate_up + row * gate_up_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * out_stride + columns, (activated * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """``out = gate / (1 + exp(-gate)) * up``, computed in float32.

    ``gate_up``: ``[num_rows, 2 * size]``, gate first; ``out``: ``[num_rows, size]`` of the same type. The activation is
    rounded to that type before the product, as `kernels.reference.silu_mul` does. Raises ValueError.
    """
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gate_up has shape {list(gate_up.shape)}")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    require_tensor("gate_up", gate_up, (num_rows, 2 * size), *FLOAT_DTYPES)
    require_tensor("out", out, (num_rows, size), gate_up.dtype)
    if out.numel() == 0:
        return
    block = min(1024, next_power_of_2(size))
    _silu_mul_kernel[(num_rows, triton.cdiv(size, block))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        size,
        BLOCK=block,
        num_warps=row_warps(block),
        **FUSED,
    )
