"""What all launchers share: what they check before a launch, and the options of every launch.

A launcher writes into the tensors it is given, allocates nothing, and leaves its work on the current stream of the
current device, which must be the tensors' own. Wrong shapes, types or strides raise ValueError: a kernel that
trusted them would read or write someone else's memory.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

# Read when a kernel is decorated, so it cannot change after import.
INTERPRETED: Final = bool(triton.knobs.runtime.interpret)

# a * b + c in one rounding. Triton 3.9 warns that its default will be turned around, so each launch says it.
FUSED: Final = {"enable_fp_fusion": True}

FLOAT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM: Final = 128  # the widest head whose build is proven free of spills
_MIN_DOT: Final = 16  # tensor cores multiply no smaller tile


def require(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def require_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless ``tensor`` has exactly this shape, one of these types, and is dense in its last
    dimension.
    """
    require(tuple(tensor.shape) == shape, f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    require(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
    require(tensor.numel() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{name} is strided inside rows")


def require_heads(name: str, tensor: Tensor, num_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """The number of heads of ``[num_tokens, num_heads, head_dim]``, whose heads must follow each other in memory.

    Rows may be apart: queries and keys are slices of one fused projection. Raises ValueError.
    """
    require(tensor.dim() == 3, f"{name} has {tensor.dim()} dimensions, not 3")
    num_heads = tensor.shape[1]
    require_tensor(name, tensor, (num_tokens, num_heads, head_dim), dtype)
    require(num_heads == 1 or tensor.stride(1) == head_dim, f"{name} has gaps between heads")
    return num_heads


def require_pool(pool: Tensor, layer: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """``(num_kv_heads, block_size, head_dim)`` of a KV pool as `kernels.reference` lays it out. Raises ValueError."""
    require(pool.dim() == 6 and pool.shape[2] == 2, f"a KV pool has no shape {list(pool.shape)}")
    require(pool.is_contiguous(), "the KV pool is not contiguous")
    require(pool.dtype == dtype, f"the KV pool is {pool.dtype}, not {dtype}")
    require(dtype in FLOAT_DTYPES, f"no kernel for {dtype}")
    require(0 <= layer < pool.shape[1], f"layer {layer} of {pool.shape[1]}")
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    require(head_dim <= MAX_HEAD_DIM, f"heads of {head_dim} are over {MAX_HEAD_DIM}")
    return num_kv_heads, block_size, head_dim


def require_attention(
    q: Tensor, pool: Tensor, layer: int, block_tables: Tensor, out: Tensor, **index: Tensor
) -> tuple[int, int, int, int]:
    """``(num_heads, num_kv_heads, block_size, head_dim)`` of an attention call whose ``index`` tensors are int32
    ``[num_sequences]`` and whose ``block_tables`` have a row for each sequence. Float32 queries read a pool of any
    type, others one of their own. Raises ValueError.
    """
    # Float32 queries widen what they read; 16-bit products take two tiles of one type.
    require(q.dtype in FLOAT_DTYPES, f"no kernel for {q.dtype}")
    num_kv_heads, block_size, head_dim = require_pool(pool, layer, pool.dtype if q.dtype == torch.float32 else q.dtype)
    num_heads = require_heads("q", q, q.shape[0], head_dim, q.dtype)
    require(require_heads("out", out, q.shape[0], head_dim, q.dtype) == num_heads, "out is not like q")
    require(num_heads % num_kv_heads == 0, f"{num_heads} heads do not share {num_kv_heads} KV heads evenly")
    require(block_tables.dim() == 2, f"block_tables has {block_tables.dim()} dimensions, not 2")
    require_tensor("block_tables", block_tables, tuple(block_tables.shape), torch.int32)
    for name, values in index.items():
        require_tensor(name, values, (block_tables.shape[0],), torch.int32)
    return num_heads, num_kv_heads, block_size, head_dim


def widens(dtype: torch.dtype) -> bool:
    """Whether tiles go to float32 before they are multiplied.

    A GPU multiplies 16-bit tiles as they are and adds in float32. The interpreter carries bfloat16 as its bits in
    a uint16 and would multiply those, silently.
    """
    return INTERPRETED or dtype == torch.float32


def padded(size: int) -> int:
    """The smallest power of two that holds ``size`` and that a matrix product takes."""
    return max(_MIN_DOT, next_power_of_2(size))


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below ``size`` (which is at least 1)."""
    return 1 << (size - 1).bit_length()


def row_warps(block: int) -> int:
    """Warps for a program that holds a row of ``block`` elements: at most 32 elements a thread of a 32-lane warp."""
    return min(16, max(1, block // 512))
