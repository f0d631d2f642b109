"""The memory of a node's KV pool: a tensor for the model and bytes in host memory for the transfer.

The cache owns the memory for the life of the process. Who may use which block is the block pool's business.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.step import BlockCopy
from kernels.reference import KeyOrder, kv_views
from kvtransfer.device_pool import LINE_BYTES, DevicePool
from kvtransfer.layout import DIM_MAJOR, TOKEN_MAJOR, BlockLayout
from kvtransfer.shared_memory import SharedMemory

log = logging.getLogger(__name__)

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KEY_ORDERS: Final[dict[str, KeyOrder]] = {TOKEN_MAJOR: "token_major", DIM_MAJOR: "dim_major"}


class KVCache:
    """A pool in host memory, which model and transfer share.

    ``pool``: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, zero at first.

    ``keys`` and ``values`` are views ``[num_blocks, num_layers, num_kv_heads, block_size, head_dim]``, whatever the
    layout's ``key_order``: with ``dim_major`` keys lie as ``[head_dim, block_size]`` inside ``pool``.

    ``memory`` is what other processes on this host may map the pool by, or None. ``device`` is what the transfer must
    know if the pool is not in host memory.
    """

    memory: SharedMemory | None = None
    device: DevicePool | None = None

    def __init__(self, layout: BlockLayout, num_blocks: int, *, shared: bool = False) -> None:
        """Takes address space only; memory is taken block by block as it is first written.

        ``shared`` lets receivers on this host read the pool where it lies; it then has no huge pages, unless the
        system gives them to shared memory. Raises OSError if there is no address space for it.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        if shared:
            self.memory = _shared_memory(num_blocks * layout.block_bytes)
        self.pool = self._allocate()
        self.keys, self.values = kv_views(self.pool, _KEY_ORDERS[layout.key_order])

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """The same memory as uint8 ``[num_blocks, block_bytes]``; writes show on both sides."""
        return _bytes(self.pool)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks within the pool, between two steps."""
        for source, target in copies:
            self.pool[target].copy_(self.pool[source])

    def zero_tail(self, block_id: int, from_offset: int) -> None:
        """Clear the slots of ``block_id`` from ``from_offset`` on, in all layers.

        A block that is sent half full would otherwise carry the bytes of the request that had it before.
        """
        for view in (self.keys, self.values):
            view[block_id, :, :, from_offset:] = 0

    def _allocate(self) -> Tensor:
        layout, num_blocks = self.layout, self.num_blocks
        # torch.zeros writes every page (5 s for 2 GiB); an anonymous map is zero without being touched.
        num_bytes = num_blocks * layout.block_bytes
        if self.memory is not None:
            memory = self.memory.buffer
        else:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # attention over scattered blocks misses the TLB less
        return torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype]).view(num_blocks, *layout.block_shape)


class DeviceKVCache(KVCache):
    """A pool on a GPU, and as much pinned host memory: its twin, for transports that know host memory only.

    It is its own `kvtransfer.device_pool.DevicePool`.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device) -> None:
        """Takes all of the memory at once, on both sides. Raises torch's OutOfMemoryError and RuntimeError."""
        self._where = device
        super().__init__(layout, num_blocks)
        self.device = self
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros(self.pool.shape, dtype=self.pool.dtype, pin_memory=self._on_gpu)
        self._blocks = self.pool.view(num_blocks, -1).view(torch.uint8)
        # Of their own: what is sent must not wait for the step that runs meanwhile. One is the owner's thread's, the
        # other the transport's.
        self._sending = torch.cuda.Stream(device) if self._on_gpu else None
        self._reading = torch.cuda.Stream(device) if self._on_gpu else None

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """The twin as uint8 ``[num_blocks, block_bytes]``."""
        return _bytes(self._host)

    def row(self, block_id: int) -> Any:
        """See `kvtransfer.device_pool.DevicePool`."""
        row = self._blocks[block_id]
        return row if self._on_gpu else row.numpy()

    def read(self, block_ids: Sequence[int], lines: npt.NDArray[np.intp] | None) -> npt.NDArray[Any]:
        """See `kvtransfer.device_pool.DevicePool`."""
        with torch.cuda.stream(self._reading):
            blocks = torch.tensor(block_ids, device=self._where)
            if lines is None:
                return self._blocks[blocks].cpu().numpy()
            in_lines = self._blocks.view(self.num_blocks, -1, LINE_BYTES)
            return in_lines[blocks[:, None], torch.from_numpy(lines).to(self._where)].cpu().numpy()

    def to_host(self, block_ids: Sequence[int]) -> None:
        """See `kvtransfer.device_pool.DevicePool`."""
        with torch.cuda.stream(self._sending):
            for block_id in block_ids:
                self._host[block_id].copy_(self.pool[block_id], non_blocking=True)
        self._settle()

    def from_host(self, block_ids: Sequence[int]) -> None:
        """See `kvtransfer.device_pool.DevicePool`: after the running step and before the next."""
        for block_id in block_ids:
            self.pool[block_id].copy_(self._host[block_id], non_blocking=True)

    def use_here(self) -> None:
        """See `kvtransfer.device_pool.DevicePool`: UCX looks for the context that is current on its thread."""
        if self._on_gpu:
            torch.cuda.set_device(self._where)
            torch.cuda.current_stream().synchronize()

    def zero_tail(self, block_id: int, from_offset: int) -> None:
        """See :class:`KVCache`."""
        with torch.cuda.stream(self._sending):
            super().zero_tail(block_id, from_offset)
        self._settle()

    def _settle(self) -> None:
        if self._sending is not None:
            self._sending.synchronize()

    def _allocate(self) -> Tensor:
        layout = self.layout
        return torch.zeros(self.num_blocks, *layout.block_shape, dtype=TORCH_DTYPES[layout.dtype], device=self._where)


def kv_cache(layout: BlockLayout, num_blocks: int, device: torch.device, *, shared: bool = False) -> KVCache:
    """The cache for a model on ``device``. ``shared`` as for :class:`KVCache`; pinned memory is never shared."""
    if device.type == "cpu":
        return KVCache(layout, num_blocks, shared=shared)
    return DeviceKVCache(layout, num_blocks, device)


def _shared_memory(num_bytes: int) -> SharedMemory | None:
    try:
        return SharedMemory(num_bytes)
    except OSError as error:
        # A sandbox may forbid it. Without address space the other kind fails too, and says so.
        log.warning("no shared memory for the KV pool, transfers within this host will be slower: %s", error)
        return None


def _bytes(blocks: Tensor) -> npt.NDArray[np.uint8]:
    view: npt.NDArray[np.uint8] = blocks.view(len(blocks), -1).view(torch.uint8).numpy()
    return view
