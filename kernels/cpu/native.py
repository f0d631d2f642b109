"""The native CPU backend: launchers for the C++ kernels beside this file.

Every call releases the GIL. The kernels share torch's OpenMP threads: torch is loaded first, and its libgomp
carries the plain name that the library asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Array, addressof, byref
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.arena import Arena
from kernels.cpu.library import Layer, Step, Weight, load_library
from kernels.decoder import DecoderLayer, DecoderStep
from kernels.host import Floats, Ids, Rows
from kernels.reference import KeyOrder, quantize_rows
from kernels.spans import Int32Array, Spans

_KINDS: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_POOL_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1}
_ITEM_ROWS: Final = 48  # rows (tokens times heads of a group) of a work item: enough arithmetic for each key read


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight as the kernels read it. ``num_outputs`` counts a gate and its up as one; the rest keeps it alive."""

    address: int
    num_outputs: int
    num_inputs: int
    nbytes: int
    held: tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class LayerStack:
    """A model's layers as one array of addresses, and the layers, which keep them valid."""

    table: Array[Layer]
    layers: tuple[DecoderLayer, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work items, longest first: int32 ``[num_items, 4]`` of first row, rows, context length, table start."""

    items: Int32Array
    block_ids: Int32Array
    num_heads: int


class Native:
    """Owns the memory of all weights it packed, until it goes.

    While one weight is worked on, the start of the one packed after it is fetched: pack in the order of use.
    """

    name = "native"
    device = torch.device("cpu")
    key_order: KeyOrder = "dim_major"

    def __init__(self, library: Path, threads: int) -> None:
        """``library``: of :func:`kernels.cpu.build.build`; ``threads``: of each call.

        Raises OSError if it cannot be loaded.
        """
        self._lib = load_library(library)
        self._threads = threads
        self._panel: int = self._lib.baton_panel()
        self._arena = Arena()
        self._weights: list[Weight] = []  # each points to the next, so none may go before the others

    def row_dtype(self, kind: str) -> torch.dtype:  # noqa: ARG002
        """See :class:`kernels.backend.Backend`."""
        return torch.float32

    def pack(
        self, parts: Iterable[Tensor], shape: tuple[int, int], kind: str, bias: Tensor | None, *, gate_up: bool
    ) -> PackedLinear:
        """See :class:`kernels.backend.Backend`."""
        outputs, inputs = shape
        stored = outputs // 2 if gate_up else outputs
        width = self._panel // 2 if gate_up else self._panel
        padded = -(-stored // width) * self._panel
        item_bytes = _DTYPES[kind].itemsize
        data = self._arena.take(padded * inputs * item_bytes)
        scales = self._values(padded) if kind == "int8" else None
        row = 0
        for part in parts:
            for begin, end, half in _halves(row, len(part), outputs, gate_up):
                self._pack_rows(part[begin - row : end - row], kind, data, scales, (begin % stored, half))
            row += len(part)
        if row != outputs:
            raise ValueError(f"{row} rows of a weight of {outputs}")
        packed_bias = None
        if bias is not None:
            packed_bias = self._values(padded)
            for begin, end, half in _halves(0, outputs, outputs, gate_up):
                self._pack_values(bias[begin:end], packed_bias, (begin % stored, half))
        weight = Weight(
            data.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if packed_bias is None else packed_bias.data_ptr(),
            None,
            stored,
            inputs,
            _KINDS[kind],
            gate_up,
        )
        if self._weights:
            self._weights[-1].next = addressof(weight)
        self._weights.append(weight)
        return PackedLinear(addressof(weight), stored, inputs, data.nbytes, (data, scales, packed_bias))

    def _pack_rows(self, rows: Tensor, kind: str, data: Tensor, scales: Tensor | None, at: tuple[int, int]) -> None:
        if scales is not None:
            values, row_scales = quantize_rows(rows)
            self._pack_values(row_scales, scales, at)
        else:
            values = rows.to(_DTYPES[kind])
        values = values.contiguous()
        num_rows, inputs = values.shape
        self._lib.baton_pack(
            values.data_ptr(), _KINDS[kind], num_rows, inputs, data.data_ptr(), at[0], at[1], self._threads
        )

    def _pack_values(self, values: Tensor, to: Tensor, at: tuple[int, int]) -> None:
        values = values.float().contiguous()
        self._lib.baton_pack_values(values.data_ptr(), len(values), to.data_ptr(), at[0], at[1])

    def _values(self, count: int) -> Tensor:
        return self._arena.take(count * 4).view(torch.float32)

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        kind = _POOL_KINDS[table.dtype]
        self._lib.baton_embed(
            token_ids.data_ptr(), len(token_ids), table.data_ptr(), kind, table.shape[1], out.data_ptr()
        )

    def linear(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        self._linear(x, weight, out, 0)

    def linear_add(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        self._linear(x, weight, out, 1)

    def linear_silu_mul(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        self._linear(x, weight, out, 0)

    def _linear(self, x: Tensor, weight: PackedLinear, out: Tensor, add: int) -> None:
        (num_rows, num_inputs), num_outputs = x.shape, out.shape[1]
        if (num_inputs, num_outputs) != (weight.num_inputs, weight.num_outputs):
            raise ValueError(f"{x.shape} and {out.shape} for {weight.num_inputs} inputs, {weight.num_outputs} outputs")
        self._lib.baton_linear(
            weight.address, x.data_ptr(), x.stride(0), num_rows, out.data_ptr(), out.stride(0), add, self._threads
        )

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
        self._lib.baton_rms_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            None if rows is None else rows.data_ptr(),
            out.shape[0],
            out.shape[1],
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            self._threads,
        )

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
        _blocks, _layers, _two, num_kv_heads, block_size, head_dim = pool.shape
        cos, sin = (None, None) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
        query_norm, key_norm, eps = (
            (None, None, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
        )
        self._lib.baton_rope_store(
            qkv.data_ptr(),
            qkv.stride(0),
            qkv.shape[0],
            qkv.shape[1] // head_dim - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            positions.data_ptr(),
            cos,
            sin,
            query_norm,
            key_norm,
            eps,
            pool.data_ptr(),
            _POOL_KINDS[pool.dtype],
            pool.stride(0),
            pool.stride(1) * layer,
            block_size,
            slots.data_ptr(),
            self._threads,
        )

    def plan(self, spans: Spans, num_heads: int, num_kv_heads: int) -> AttentionPlan:
        """See :class:`kernels.backend.Backend`. Raises ValueError for head groups beyond the kernels' buffers."""
        group = num_heads // num_kv_heads
        if group > self._lib.baton_max_item_rows():
            raise ValueError(f"{group} query heads on one KV head; the native kernels take 64")
        size = max(1, _ITEM_ROWS // group)
        num_items = -(-spans.num_rows // size)
        owners = np.repeat(np.arange(len(num_items)), num_items)
        start = (np.arange(len(owners)) - np.repeat(np.cumsum(num_items) - num_items, num_items)) * size
        rows = np.minimum(spans.num_rows[owners] - start, size)
        context = (spans.context_lens - spans.num_rows)[owners] + start + rows
        items = np.stack((spans.first_rows[owners] + start, rows, context, spans.table_starts[owners]), axis=1)
        longest_first = np.argsort(-rows * context, kind="stable")
        return AttentionPlan(np.ascontiguousarray(items[longest_first], dtype=np.int32), spans.block_ids, num_heads)

    def attention(self, qkv: Tensor, pool: Tensor, layer: int, plan: AttentionPlan, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        _blocks, _layers, _two, num_kv_heads, block_size, head_dim = pool.shape
        self._lib.baton_attention(
            qkv.data_ptr(),
            qkv.stride(0),
            out.data_ptr(),
            out.stride(0),
            plan.num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            pool.data_ptr(),
            _POOL_KINDS[pool.dtype],
            pool.stride(0),
            pool.stride(1) * layer,
            plan.block_ids.ctypes.data,
            plan.items.ctypes.data,
            len(plan.items),
            head_dim**-0.5,
            self._threads,
        )

    def exp_sums(self, matrix: Rows, rows: Ids, shifts: Rows, scales: Rows) -> Floats:
        """See :class:`kernels.backend.Backend`."""
        matrix = np.ascontiguousarray(matrix)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(matrix):
            raise ValueError(f"rows {rows} of a matrix of {len(matrix)}")
        sums = np.empty(len(rows))
        self._lib.baton_exp_sums(
            *(each.ctypes.data for each in (matrix, rows)),
            len(rows),
            matrix.shape[1],
            *(each.ctypes.data for each in (shifts, scales, sums)),
            self._threads,
        )
        return sums

    def read(self, address: int, num_bytes: int, threads: int) -> float:
        """Read memory from end to end, for benchmarks; returns some sum."""
        total: float = self._lib.baton_read(address, num_bytes, threads)
        return total

    def stack(self, layers: Sequence[DecoderLayer]) -> LayerStack:
        """See :class:`kernels.backend.Backend`."""
        table = (Layer * len(layers))()
        for entry, layer in zip(table, layers, strict=True):
            for name in ("qkv", "output", "gate_up", "down"):
                setattr(entry, name, getattr(layer, name).address)
            for name in ("input_norm", "post_norm", "query_norm", "key_norm"):
                weight: Tensor | None = getattr(layer, name)
                setattr(entry, name, None if weight is None else weight.data_ptr())
            entry.rope = layer.rope
        return LayerStack(table, tuple(layers))

    def run(self, stack: LayerStack, step: DecoderStep) -> None:
        """See :class:`kernels.backend.Backend`."""
        _blocks, _layers, _two, num_kv_heads, block_size, head_dim = step.pool.shape
        plan: AttentionPlan = step.plan
        arguments = Step(
            *(each.data_ptr() for each in (step.x, step.hidden, step.qkv, step.attended, step.inner)),
            *(each.data_ptr() for each in (step.positions, step.slots, *step.angles, step.pool)),
            plan.block_ids.ctypes.data,
            plan.items.ctypes.data,
            len(step.x),
            len(plan.items),
            step.x.shape[1],
            step.inner.shape[1],
            plan.num_heads,
            num_kv_heads,
            head_dim,
            _POOL_KINDS[step.pool.dtype],
            block_size,
            step.pool.stride(0),
            step.pool.stride(1),
            step.eps,
            head_dim**-0.5,
        )
        self._lib.baton_layers(byref(arguments), stack.table, len(stack.table), self._threads)


def _halves(row: int, count: int, outputs: int, gate_up: bool) -> list[tuple[int, int, int]]:
    """Rows ``row .. row + count - 1`` of a weight as runs (begin, end, half), cut where gates end and ups begin."""
    if not gate_up:
        return [(row, row + count, -1)]
    middle = outputs // 2
    runs = [(row, min(row + count, middle), 0), (max(row, middle), row + count, 1)]
    return [(begin, end, half) for begin, end, half in runs if begin < end]
