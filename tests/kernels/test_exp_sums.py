"""Sums of exponentials over whole rows: every backend takes them as numpy in double precision does."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from tests import backends


@pytest.mark.parametrize("name", backends.NAMES)
@pytest.mark.parametrize("size", [1, 3, 8, 15, 16, 17, 511, 1024, 1033, 49_152])
def test_sums_are_those_of_double_precision(name: str, size: int) -> None:
    ops = backends.make(name)
    made = np.random.default_rng(size)
    matrix = (made.standard_normal((11, size)) * 6).astype(np.float32)
    matrix[3, : size - 1] = -np.inf
    matrix[4] = 2.5
    rows = np.array([10, 3, 4, 0, 7, 1, 2, 5, 6], np.int64)
    shifts = matrix[rows].max(axis=1)
    scales = np.array([1, 1.25, 1, 0.5, 1e9, 1, 1, 3, 2], np.float32)
    exact = np.exp((matrix[rows].astype(np.float64) - shifts[:, None]) * scales[:, None]).sum(axis=1)
    got = ops.exp_sums(matrix, rows, shifts, scales)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, exact, rtol=2e-6)


@pytest.mark.parametrize("name", backends.NAMES)
def test_no_batch_changes_the_bits_of_a_sum(name: str) -> None:
    matrix = np.random.default_rng(1).standard_normal((40, 1000)).astype(np.float32)
    shifts, scales = matrix.max(axis=1), np.full(40, 1.1, np.float32)
    together = backends.make(name, 2).exp_sums(matrix, np.arange(40), shifts, scales)
    ops = backends.make(name)
    for row in range(40):
        one = slice(row, row + 1)
        assert ops.exp_sums(matrix[one], np.array([0]), shifts[one], scales[one])[0] == together[row]


def test_rows_outside_the_matrix_are_refused() -> None:
    ops = backends.make("native")
    one = np.ones(1, np.float32)
    for row in (-1, 2):
        with pytest.raises(ValueError, match="rows"):
            ops.exp_sums(np.zeros((2, 4), np.float32), np.array([row]), one, one)
