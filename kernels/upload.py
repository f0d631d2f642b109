"""Small index arrays to a device in one copy: each copy costs more to start than these take to cross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT_BYTES: Final = 16  # Triton builds a kernel anew for pointers that are not


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of the arrays' shapes on ``device``, views of one allocation, each aligned to 16 bytes.

    All arrays must be of one type. The copy is in the order of the current stream; the arrays may change at once.
    """
    dtype = arrays[0].dtype
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    starts = np.cumsum([0, *(-(-array.size // unit) * unit for array in arrays)])
    flat = torch.from_numpy(np.zeros(int(starts[-1]), dtype))
    if device.type == "cuda":
        flat = flat.pin_memory()
    staged = flat.numpy()
    for start, array in zip(starts, arrays, strict=False):
        staged[start : start + array.size] = array.reshape(-1)
    there = flat.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]
