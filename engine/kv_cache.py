"""The memory of a node's KV pool: one tensor for the model, the same bytes for the transfer.

The cache owns the memory for the life of the process. Who may use which block is the block pool's business.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference import KeyOrder, kv_views
from kvtransfer.layout import DIM_MAJOR, TOKEN_MAJOR, BlockLayout

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU: Final = torch.device("cpu")
_KEY_ORDERS: Final[dict[str, KeyOrder]] = {TOKEN_MAJOR: "token_major", DIM_MAJOR: "dim_major"}


class KVCache:
    """``pool``: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, zero at first.

    ``keys`` and ``values`` are views ``[num_blocks, num_layers, num_kv_heads, block_size, head_dim]``, whatever the
    layout's ``key_order``: with ``dim_major`` keys lie as ``[head_dim, block_size]`` inside ``pool``.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device = _CPU) -> None:
        """On the CPU, takes address space only; memory is taken block by block as it is first written.

        Raises OSError if there is no address space for it, and torch's OutOfMemoryError on a GPU.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool = _pool(layout, num_blocks, device)
        self.keys, self.values = kv_views(self.pool, _KEY_ORDERS[layout.key_order])

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """The same memory as uint8 ``[num_blocks, block_bytes]``; writes show on both sides."""
        view: npt.NDArray[np.uint8] = self.pool.view(self.num_blocks, -1).view(torch.uint8).numpy()
        return view

    def zero_tail(self, block_id: int, from_offset: int) -> None:
        """Clear the slots of ``block_id`` from ``from_offset`` on, in all layers.

        A block that is sent half full would otherwise carry the bytes of the request that had it before.
        """
        for view in (self.keys, self.values):
            view[block_id, :, :, from_offset:] = 0


def _pool(layout: BlockLayout, num_blocks: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_blocks, *layout.block_shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
    # torch.zeros writes every page (5 s for 2 GiB); an anonymous map is zero without being touched.
    memory = mmap.mmap(-1, num_blocks * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # attention over scattered blocks misses the TLB less
    return torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype]).view(num_blocks, *layout.block_shape)
