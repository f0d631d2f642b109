"""Memory for weights."""

from __future__ import annotations

import mmap
from typing import Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 64
_MAP_BYTES: Final = 64 << 20


class Arena:
    """Zeroed memory on huge pages, given out from the front of large maps and never given back one by one.

    Weights are read from end to end at each step: with 4 KiB pages the TLB would miss every 64 cache lines.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]``, at a cache line's start."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._left):
            memory = mmap.mmap(-1, max(rounded, _MAP_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(memory, dtype=torch.uint8)
        taken = self._left[:num_bytes]
        self._left = self._left[rounded:]
        return taken
