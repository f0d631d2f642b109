"""Kernels that work on rows, in the interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from bench import triton_cases as cases
from bench.triton_cases import Comparison, Heads
from kernels import reference
from kernels.triton import launch
from kernels.triton.blocks import gather_blocks, scatter_blocks
from kernels.triton.norm import rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [Heads(4, 1, 64), Heads(6, 2, 128), Heads(3, 3, 64), Heads(9, 3, 4), Heads(2, 1, 96)]


def check(comparisons: list[Comparison]) -> None:
    assert [one for one in comparisons if not one.good] == []


def test_this_process_interprets() -> None:
    assert launch.INTERPRETED


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 66, 576])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    check(cases.norms(dtype, num_rows=3, size=size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 1030])
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    check(cases.activation(dtype, num_rows=3, size=size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rope(dtype: torch.dtype, heads: Heads) -> None:
    check(cases.rope(heads, dtype, num_tokens=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block_size", [4, 5, 16])
def test_store_kv_writes_exactly_its_slots(dtype: torch.dtype, heads: Heads, block_size: int) -> None:
    check(cases.store(heads, dtype, block_size))


def test_a_row_of_a_norm_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(5, 66), torch.randn(66)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    rms_norm(x, weight, 1e-5, together)
    for row in range(5):
        rms_norm(x[row : row + 1], weight, 1e-5, alone[row : row + 1])
    assert torch.equal(together, alone)
    assert torch.allclose(together, reference.rms_norm(x, weight, 1e-5), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (2, 2, 3, 16, 12)),  # more words than one program copies
        (torch.float32, (1, 2, 1, 3, 1)),
        (torch.float16, (1, 2, 1, 1, 3)),
        (torch.uint8, (1, 1, 1, 5, 1)),
    ],
)
def test_blocks_cross_the_staging_buffer_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # Random bytes: among them NaNs of every kind, which a copy through floats might quieten.
    count = torch.Size(shape).numel() * dtype.itemsize
    pool = torch.randint(0, 256, (6, count), dtype=torch.uint8).view(dtype).view(6, *shape)
    block_ids = torch.tensor([4, 0, 5])
    staging = torch.zeros(3, *shape, dtype=dtype)
    gathered = cases.copied(lambda: gather_blocks(pool, block_ids, staging), staging, pool[block_ids], "gather")
    restored = torch.zeros_like(pool)
    expected = torch.zeros_like(pool)
    expected[block_ids] = pool[block_ids]
    scattered = cases.copied(lambda: scatter_blocks(staging, block_ids, restored), restored, expected, "scatter")
    check([gathered, scattered])
