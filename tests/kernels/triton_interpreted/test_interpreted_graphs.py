"""What surrounds the graphs: choice of size, padding, stale rows. The recording itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.triton_cases import Heads, PagedBatch, paged_batch
from bench.triton_step import OneLayerStep, inputs_of
from kernels.triton.graphs import DecodeGraphs, Recorded

HEADS = Heads(4, 2, 64)
SIZES = [4, 1, 2]


def recorded_by_repeating(call: Callable[[], Tensor]) -> Recorded:
    output = call()
    return Recorded(lambda: output.copy_(call()), output)


@pytest.fixture
def batch() -> PagedBatch:
    return paged_batch(HEADS, torch.float32, [(1, 20), (1, 300), (1, 1), (1, 33)], block_size=16)


def test_a_step_in_a_graph_equals_the_step_itself(batch: PagedBatch) -> None:
    step = OneLayerStep(batch)
    graphs = DecodeGraphs(step, SIZES, 32, torch.device("cpu"), recorded_by_repeating)
    assert step.sizes == [4, 2, 1]
    untouched = batch.pool.clone()
    expected = step(inputs_of(batch, [0, 1, 2, 3]))
    after = batch.pool.clone()
    for rows, size in (([0, 1, 2, 3], 4), ([2], 1), ([1, 3], 2), ([3, 0, 1], 4), ([0], 1)):
        batch.pool.copy_(untouched)
        for row in range(4):  # the other sequences' last tokens are there as well, as nothing may disturb them
            step(inputs_of(batch, [row]))
        found = graphs.run(inputs_of(batch, rows))
        assert step.sizes[-1] == size
        assert torch.equal(found, expected[rows])
        assert torch.equal(batch.pool.view(torch.int32), after.view(torch.int32))


def test_stale_rows_of_a_larger_batch_store_nothing(batch: PagedBatch) -> None:
    step = OneLayerStep(batch)
    graphs = DecodeGraphs(step, [4], 32, torch.device("cpu"), recorded_by_repeating)
    graphs.run(inputs_of(batch, [0, 1, 2, 3]))
    batch.pool.fill_(7.0)
    graphs.run(inputs_of(batch, [2]))
    written = (batch.pool != 7.0).flatten(1).any(1).nonzero().flatten().tolist()
    assert written == [int(batch.block_tables[2, 0])]


def test_what_has_no_graph_is_refused(batch: PagedBatch) -> None:
    graphs = DecodeGraphs(OneLayerStep(batch), [1, 2], 20, torch.device("cpu"), recorded_by_repeating)
    assert [graphs.size_for(count) for count in (1, 2, 3)] == [1, 2, None]
    with pytest.raises(ValueError, match="no graph for 3 sequences"):
        graphs.run(inputs_of(batch, [0, 1, 2]))
    long = paged_batch(HEADS, torch.float32, [(1, 400)], block_size=16)
    with pytest.raises(ValueError, match="25 blocks"):
        graphs.run(inputs_of(long, [0]))
    for sizes in ([], [0, 1]):
        with pytest.raises(ValueError, match="positive"):
            DecodeGraphs(OneLayerStep(batch), sizes, 20, torch.device("cpu"), recorded_by_repeating)
