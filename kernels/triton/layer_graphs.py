"""A model's layers as CUDA graphs, for decode steps: `kernels.decoder.run_layers` recorded once for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from kernels.decoder import DecoderLayer, DecoderStep, run_layers
from kernels.triton.decode import DecodeWorkspace
from kernels.triton.graphs import DecodeGraphs, DecodeInputs, Recorder
from kernels.triton.plan import BatchPlan, Tokens

if TYPE_CHECKING:
    from kernels.backend import Backend


class LayerGraphs:
    """Graphs over one KV pool. Owns their buffers and workspace, which steps are copied into and out of.

    The graphs keep the pool's address: the pool must outlive them.
    """

    def __init__(
        self,
        ops: Backend,
        layers: Sequence[DecoderLayer],
        step: DecoderStep,
        batch_sizes: Sequence[int],
        recorder: Recorder | None,
    ) -> None:
        """Record for steps like ``step``, of any context that its angles cover and its pool can hold.

        Takes seconds: the kernels that are not built yet are built.
        """
        self._ops, self._layers, self._like = ops, layers, step
        size, device = max(batch_sizes), step.x.device
        num_blocks, block_size, head_dim = step.pool.shape[0], step.pool.shape[4], step.pool.shape[5]
        max_blocks = min(triton.cdiv(len(step.angles[0]), block_size), num_blocks)
        self._max_blocks = max_blocks
        self._x, self._hidden, self._qkv, self._attended, self._inner = (
            torch.zeros(size, buffer.shape[1], dtype=buffer.dtype, device=device)
            for buffer in (step.x, step.hidden, step.qkv, step.attended, step.inner)
        )
        self._rows = torch.arange(size, dtype=torch.int32, device=device)
        num_heads = step.attended.shape[1] // head_dim
        self._workspace = DecodeWorkspace(size, num_heads, head_dim, max_blocks * block_size, device)
        self._graphs = DecodeGraphs(self._step, batch_sizes, max_blocks, device, recorder)

    def run(self, step: DecoderStep) -> bool:
        """Run the step if it is one of those recorded; otherwise return False and leave it alone."""
        plan: BatchPlan = step.plan
        like, tokens, num_rows = self._like, plan.tokens, len(step.x)
        if not plan.decodes or tokens is None or step.pool is not like.pool or step.angles is not like.angles:
            return False
        size = self._graphs.size_for(num_rows)
        if size is None or tokens.block_tables.shape[1] > self._max_blocks or step.x.dtype != self._x.dtype:
            return False
        self._x[:num_rows].copy_(step.x)
        self._x[num_rows:size].zero_()
        # The layers do not look at token ids.
        inputs = DecodeInputs(step.positions, step.positions, step.slots, tokens.context_lens, tokens.block_tables)
        step.x.copy_(self._graphs.run(inputs))
        return True

    def _step(self, inputs: DecodeInputs) -> Tensor:
        count = len(inputs.slots)
        tokens = Tokens(
            rows=self._rows[:count],
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            max_context=self._workspace.max_context,
            workspace=self._workspace,
        )
        step = DecoderStep(
            x=self._x[:count],
            hidden=self._hidden[:count],
            qkv=self._qkv[:count],
            attended=self._attended[:count],
            inner=self._inner[:count],
            positions=inputs.positions,
            slots=inputs.slots,
            angles=self._like.angles,
            eps=self._like.eps,
            pool=self._like.pool,
            plan=BatchPlan(chunks=None, tokens=tokens, decodes=True),
        )
        run_layers(self._ops, self._layers, step)
        return step.x
