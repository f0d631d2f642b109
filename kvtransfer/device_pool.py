"""A pool that lies on a GPU, as a plane sees it.

The plane's own pool is then its twin in host memory, where blocks stop on their way to and from transports that know
host memory only. UCX, where it knows GPUs, takes the blocks as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

# Of a line, the unit that digests sample.
LINE_BYTES: Final = 64


class DevicePool(Protocol):
    """Whoever opens a plane over a GPU's pool implements it.

    `to_host` and `from_host` are called on the plane's owner's thread, the rest on its transport's.
    """

    def row(self, block_id: int) -> Any:
        """The block's bytes as they are: ``uint8 [block_bytes]`` with ``__cuda_array_interface__``."""
        ...

    def read(self, block_ids: Sequence[int], lines: npt.NDArray[np.intp] | None) -> npt.NDArray[Any]:
        """Copy out and wait: for each block its bytes, or those of the ``lines`` ``[blocks, n]`` in it.

        ``uint8 [blocks, block_bytes]``, or ``[blocks, n, LINE_BYTES]`` (as bytes or as wider words).

        Steps that wrote the blocks are done.
        """
        ...

    def to_host(self, block_ids: Sequence[int]) -> None:
        """Copy to the twin what finished steps have written into these blocks, and wait."""
        ...

    def from_host(self, block_ids: Sequence[int]) -> None:
        """Copy from the twin what the transfer has written into these blocks, before the next step."""
        ...

    def use_here(self) -> None:
        """This thread will hand the GPU's memory to a transport."""
        ...
