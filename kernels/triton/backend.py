"""The operations of a step on a GPU: Triton kernels, and the vendor's library (cuBLAS, hipBLAS) for the products.

Rows are of the weights' type: bfloat16 throughout with bfloat16 weights. Attention does not depend on the batch;
the vendor's products do, so neither do logits to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor

from kernels import host
from kernels.backend import BackendError, KeyOrder, WeightKind
from kernels.decoder import DecoderLayer, DecoderStep, run_layers
from kernels.spans import Spans
from kernels.triton.activation import silu_mul
from kernels.triton.decode import SPLIT_TOKENS, DecodeWorkspace, paged_decode
from kernels.triton.graphs import Recorder
from kernels.triton.launch import INTERPRETED, next_power_of_2
from kernels.triton.layer_graphs import LayerGraphs
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.plan import BatchPlan, plan_batch
from kernels.triton.prefill import paged_prefill
from kernels.triton.rope import apply_rope
from kernels.triton.store import store_kv

GRAPH_BATCHES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_DTYPES: Final[dict[WeightKind, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FIRST_SEQUENCES: Final = 16  # the workspace is made for so many at first


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """``weight``: ``[num_outputs, num_inputs]``; ``bias``: float32 ``[num_outputs]``. Both on the device."""

    weight: Tensor
    bias: Tensor | None

    def of(self, dtype: torch.dtype) -> Tensor:
        """The weight, transposed, as ``dtype``: a copy, and slow, if it is of another."""
        return self.weight.to(dtype).t()


@dataclass(slots=True)
class Stack:
    """A model's layers, and their graphs once there are any."""

    layers: tuple[DecoderLayer, ...]
    graphs: LayerGraphs | None = None


class Triton:
    """A `kernels.backend.Backend`. Everything it is given lies on ``device``, which is the current one."""

    name = "triton"
    key_order: KeyOrder = "token_major"

    def __init__(
        self, device: torch.device, *, graph_batches: Sequence[int] = GRAPH_BATCHES, recorder: Recorder | None = None
    ) -> None:
        """``graph_batches``: sizes of decode batches that become graphs, at the first decode step. ``recorder``: for
        tests; without one there are graphs on GPUs only. Raises :class:`BackendError` for a device without kernels.
        """
        if device.type != "cuda" and not INTERPRETED:
            raise BackendError(f"triton has no kernels for device {device}")
        self.device = device
        self._graph_batches = graph_batches if device.type == "cuda" or recorder is not None else ()
        self._recorder = recorder
        self._workspace: DecodeWorkspace | None = None

    def row_dtype(self, kind: WeightKind) -> torch.dtype:
        """See :class:`kernels.backend.Backend`."""
        if kind not in _DTYPES:
            raise BackendError(f"the triton backend has no {kind} weights, only {' and '.join(_DTYPES)}")
        return _DTYPES[kind]

    def pack(
        self,
        parts: Iterable[Tensor],
        shape: tuple[int, int],
        kind: WeightKind,
        bias: Tensor | None,
        *,
        gate_up: bool,  # noqa: ARG002
    ) -> PackedLinear:
        """See :class:`kernels.backend.Backend`. Raises :class:`BackendError` for int8."""
        weight = torch.empty(shape, dtype=self.row_dtype(kind), device=self.device)
        filled = 0
        for part in parts:
            if filled + len(part) > shape[0] or part.shape[1] != shape[1]:
                raise ValueError(f"rows of {tuple(part.shape)} after {filled} do not fit a weight of {shape}")
            weight[filled : filled + len(part)].copy_(part)
            filled += len(part)
        if filled != shape[0]:
            raise ValueError(f"{filled} rows where {shape[0]} were announced")
        return PackedLinear(weight, None if bias is None else bias.to(self.device, torch.float32))

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        out.copy_(F.embedding(token_ids, table))

    def linear(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`. ``out`` may be of another type than ``x``."""
        if out.dtype == x.dtype:
            torch.mm(x, weight.of(x.dtype), out=out)
        else:
            out.copy_(torch.mm(x, weight.of(x.dtype)))
        if weight.bias is not None:
            out.add_(weight.bias)

    def linear_add(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        out.addmm_(x, weight.of(x.dtype))
        if weight.bias is not None:
            out.add_(weight.bias)

    def linear_silu_mul(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        gate_up = torch.mm(x, weight.of(x.dtype))
        if weight.bias is not None:
            gate_up.add_(weight.bias)
        silu_mul(gate_up, out)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        *,
        delta: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """See :class:`kernels.backend.Backend`."""
        if delta is not None:
            add_rms_norm(delta, x, weight, eps, out)
        else:
            rms_norm(x if rows is None else x.index_select(0, rows), weight, eps, out)

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        norms: tuple[Tensor, Tensor, float] | None,
        pool: Tensor,
        layer: int,
        slots: Tensor,
    ) -> None:
        """See :class:`kernels.backend.Backend`."""
        kv_heads, head_dim = pool.shape[3], pool.shape[5]
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            rms_norm(q, norms[0], norms[2], q)
            rms_norm(k, norms[1], norms[2], k)
        if angles is not None:
            apply_rope(q, k, positions, *angles, q, k)
        store_kv(pool, layer, k.to(pool.dtype), v.to(pool.dtype), slots)

    def plan(self, spans: Spans, num_heads: int, num_kv_heads: int) -> BatchPlan:  # noqa: ARG002
        """See :class:`kernels.backend.Backend`."""
        return plan_batch(spans, self.device)

    def attention(self, qkv: Tensor, pool: Tensor, layer: int, plan: BatchPlan, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        head_dim = pool.shape[5]
        num_heads = out.shape[1] // head_dim
        q = qkv.view(len(qkv), -1, head_dim)[:, :num_heads]
        rows = out.view(len(out), num_heads, head_dim)
        if (chunks := plan.chunks) is not None:
            index = (chunks.first_rows, chunks.row_counts, chunks.context_lens, chunks.block_tables)
            paged_prefill(q, pool, layer, *index, chunks.max_rows, rows)
        if (tokens := plan.tokens) is not None:
            workspace = tokens.workspace or self._room(len(tokens.rows), num_heads, head_dim, tokens.max_context)
            paged_decode(q, pool, layer, tokens.rows, tokens.context_lens, tokens.block_tables, workspace, rows)

    def exp_sums(self, matrix: host.Rows, rows: host.Ids, shifts: host.Rows, scales: host.Rows) -> host.Floats:
        """See :class:`kernels.backend.Backend`."""
        return host.exp_sums(matrix, rows, shifts, scales)

    def stack(self, layers: Sequence[DecoderLayer]) -> Stack:
        """See :class:`kernels.backend.Backend`."""
        return Stack(tuple(layers))

    def run(self, stack: Stack, step: DecoderStep) -> None:
        """See :class:`kernels.backend.Backend`. The first decode step records the graphs, for its pool."""
        if self._graph_batches and step.plan.decodes:
            if stack.graphs is None:
                stack.graphs = LayerGraphs(self, stack.layers, step, self._graph_batches, self._recorder)
            if stack.graphs.run(step):
                return
        run_layers(self, stack.layers, step)

    def _room(self, num_sequences: int, num_heads: int, head_dim: int, context: int) -> DecodeWorkspace:
        """A workspace at least this large, the last one if it is."""
        now = self._workspace
        sequences, length = _FIRST_SEQUENCES, SPLIT_TOKENS
        if now is not None and now.values.shape[1::2] == (num_heads, head_dim):
            sequences, length = now.values.shape[0], now.max_context
            if sequences >= num_sequences and length >= context:
                return now
        sequences, length = max(sequences, next_power_of_2(num_sequences)), max(length, next_power_of_2(context))
        self._workspace = DecodeWorkspace(sequences, num_heads, head_dim, length, self.device)
        return self._workspace
