"""The sequences of a batch, as every backend takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Spans:
    """Sequence ``i`` has rows ``first_rows[i] .. first_rows[i] + num_rows[i] - 1``: the last of its
    ``context_lens[i]`` positions. The spans cover all rows of the batch once.

    All int32. ``first_rows``, ``num_rows``, ``context_lens``: ``[num_sequences]``; ``table_starts``:
    ``[num_sequences + 1]``; ``block_ids[table_starts[i]:table_starts[i + 1]]`` are exactly the blocks of sequence
    ``i``'s context.
    """

    first_rows: Int32Array
    num_rows: Int32Array
    context_lens: Int32Array
    table_starts: Int32Array
    block_ids: Int32Array

    @classmethod
    def single(cls, num_rows: int, context_len: int, block_ids: Int32Array) -> Spans:
        """A batch of one sequence."""
        first, rows, context = (np.array([value], dtype=np.int32) for value in (0, num_rows, context_len))
        starts = np.array([0, len(block_ids)], dtype=np.int32)
        return cls(first, rows, context, starts, np.ascontiguousarray(block_ids, dtype=np.int32))
