"""What the sampler asks of the host, whatever computes the logits: here in numpy, row by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def exp_sums(matrix: Rows, rows: Ids, shifts: Rows, scales: Rows) -> Floats:
    """For each of ``rows`` of ``matrix``: the sum of exp((x - shift) * scale) over that row.

    ``matrix``: ``[num_rows, size]``, at most ``shift`` in its row, -inf allowed; ``shifts`` and ``scales``:
    ``[len(rows)]``, finite. One row at a time stays in the core's own cache, where a batch takes a trip to memory for
    every operation; and no number of rows or threads can change the order in which a sum is taken.
    """
    scratch = np.empty(matrix.shape[1], np.float32)  # fresh memory costs as much as the arithmetic
    sums = np.empty(len(rows))
    with np.errstate(over="ignore"):  # what is too far away has no weight
        for index, row in enumerate(rows.tolist()):
            np.subtract(matrix[row], shifts[index], out=scratch)
            np.multiply(scratch, scales[index], out=scratch)
            sums[index] = np.add.reduce(np.exp(scratch, out=scratch))
    return sums
