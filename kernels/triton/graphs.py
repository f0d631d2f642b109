"""Decode steps as CUDA graphs: a step of a few hundred small kernels becomes one launch.

A graph replays fixed shapes on fixed memory, so there is one for each of a list of batch sizes, recorded at start;
a batch runs in the smallest that holds it, the rest of its rows being padding that touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

PADDING_SLOT: Final = -1  # `store_kv` does not write it


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What changes from one decode step to the next, one entry for each sequence.

    ``token_ids``, ``positions``, ``slots``: int64 ``[num_sequences]``; ``context_lens``: int32 ``[num_sequences]``, 0
    for padding; ``block_tables``: int32 ``[num_sequences, max_blocks]``. Meanings as in `store_kv` and `paged_decode`.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    block_tables: Tensor

    @classmethod
    def padding(cls, num_sequences: int, max_blocks: int, device: torch.device | str) -> DecodeInputs:
        """A batch of nothing: a step on it reads no key and writes none."""
        ids, positions = torch.zeros(2, num_sequences, dtype=torch.int64, device=device).unbind(0)
        slots = torch.full_like(ids, PADDING_SLOT)
        tables = torch.zeros(num_sequences, max_blocks, dtype=torch.int32, device=device)
        return cls(ids, positions, slots, torch.zeros(num_sequences, dtype=torch.int32, device=device), tables)

    def first(self, num_sequences: int) -> DecodeInputs:
        """The same memory's first entries."""
        return DecodeInputs(*(getattr(self, field.name)[:num_sequences] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded call: ``replay()`` runs it again on the same memory and leaves its result in ``output``."""

    replay: Callable[[], None]
    output: Tensor


Recorder = Callable[[Callable[[], Tensor]], Recorded]


class CudaRecorder:
    """Records calls as CUDA graphs (HIP graphs on AMD) that share one pool of temporary memory.

    Sharing is safe since steps run one after another; each graph's output stays its own while it is referenced.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        """Record ``call``, which must launch the same work every time, allocate no lasting memory and not wait."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # The first calls compile kernels and create cuBLAS's handles and workspace: not allowed while recording.
            for _ in range(2):
                call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = call()
        return Recorded(graph.replay, output)


class DecodeGraphs:
    """One recorded step for each batch size. Owns the input memory the graphs read, and their outputs."""

    def __init__(
        self,
        step: Callable[[DecodeInputs], Tensor],
        batch_sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        """Record ``step`` for each of ``batch_sizes`` (several seconds for each at first, for compiling).

        ``step`` returns a tensor with a row for each sequence; ``max_blocks`` is the length of a block table;
        ``recorder`` is a `CudaRecorder` by default. Raises ValueError for no or for non-positive sizes.
        """
        if not batch_sizes or min(batch_sizes) <= 0:
            raise ValueError(f"batch sizes {list(batch_sizes)} are not all positive")
        record = recorder or CudaRecorder(device)
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self._inputs = DecodeInputs.padding(self.batch_sizes[-1], max_blocks, device)
        # The largest first: the memory it needs is enough for the others.
        self._recorded = {size: record(_bound(step, self._inputs.first(size))) for size in reversed(self.batch_sizes)}

    def size_for(self, num_sequences: int) -> int | None:
        """The batch size that holds so many sequences, or None if none does (run the step itself then)."""
        return next((size for size in self.batch_sizes if size >= num_sequences), None)

    def run(self, inputs: DecodeInputs) -> Tensor:
        """Run the step on ``inputs`` (on any device); returns its rows, valid until the next run.

        Block tables may be shorter than ``max_blocks``. Raises ValueError if there are more sequences than the
        largest batch size, or longer tables.
        """
        num_sequences, num_blocks = inputs.block_tables.shape
        size = self.size_for(num_sequences)
        if size is None or num_blocks > self._inputs.block_tables.shape[1]:
            raise ValueError(f"no graph for {num_sequences} sequences with {num_blocks} blocks")
        for name in ("token_ids", "positions", "slots", "context_lens"):
            getattr(self._inputs, name)[:num_sequences].copy_(getattr(inputs, name), non_blocking=True)
        self._inputs.block_tables[:num_sequences, :num_blocks].copy_(inputs.block_tables, non_blocking=True)
        # What an earlier, larger batch left behind must not be computed, and above all not be stored, again.
        self._inputs.slots[num_sequences:size].fill_(PADDING_SLOT)
        self._inputs.context_lens[num_sequences:size].zero_()
        recorded = self._recorded[size]
        recorded.replay()
        return recorded.output[:num_sequences]


def _bound(step: Callable[[DecodeInputs], Tensor], inputs: DecodeInputs) -> Callable[[], Tensor]:
    return lambda: step(inputs)
