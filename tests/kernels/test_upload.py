from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kernels.upload import upload  # noqa: E402


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_arrive_as_they_are_and_aligned(dtype: type) -> None:
    arrays = [np.arange(size, dtype=dtype) for size in (1, 5, 0, 4)]
    arrays.append(np.arange(21, dtype=dtype).reshape(3, 7)[:, :5])
    found = upload(arrays, torch.device("cpu"))
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.is_contiguous()
        assert tensor.tolist() == array.tolist()
        assert tensor.numel() == 0 or tensor.data_ptr() % 16 == 0
    arrays[1][0] = 99
    assert found[1][0] == 0
