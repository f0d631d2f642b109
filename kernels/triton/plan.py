"""A batch as the attention kernels take it: chunks of several rows for one, single rows for the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.spans import Int32Array, Spans
from kernels.triton.decode import DecodeWorkspace
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class Chunks:
    """Arguments of `paged_prefill`."""

    first_rows: Tensor
    row_counts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_rows: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Arguments of `paged_decode`. ``max_context``: the longest of ``context_lens``, in tokens. ``workspace``: None
    for one of the backend's.
    """

    rows: Tensor
    context_lens: Tensor
    block_tables: Tensor
    max_context: int
    workspace: DecodeWorkspace | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """``decodes``: every row is a sequence's only one, in the order of ``tokens``."""

    chunks: Chunks | None
    tokens: Tokens | None
    decodes: bool


def plan_batch(spans: Spans, device: torch.device) -> BatchPlan:
    """Split a batch and put its index arrays on ``device``, in one copy; tables are padded with block 0."""
    num_blocks = np.diff(spans.table_starts)
    tables = np.zeros((len(num_blocks), int(num_blocks.max(initial=0))), np.int32)
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = spans.block_ids
    single = spans.num_rows == 1

    def part(chosen: npt.NDArray[np.bool_]) -> list[Int32Array]:
        width = int(num_blocks[chosen].max(initial=0))
        columns = (spans.first_rows, spans.num_rows, spans.context_lens)
        return [*(column[chosen] for column in columns), tables[chosen, :width]]

    ones, others = part(single), part(~single)
    on_device = upload([*ones, *others], device)
    tokens = chunks = None
    if len(ones[0]):
        rows, _counts, context_lens, block_tables = on_device[:4]
        tokens = Tokens(rows, context_lens, block_tables, int(ones[2].max()))
    if len(others[0]):
        first_rows, row_counts, context_lens, block_tables = on_device[4:]
        chunks = Chunks(first_rows, row_counts, context_lens, block_tables, int(others[1].max()))
    return BatchPlan(chunks, tokens, chunks is None and np.array_equal(ones[0], np.arange(len(ones[0]))))
