"""The native CPU backend: launchers for the C++ kernels beside this file.

Every call releases the GIL. The kernels share torch's OpenMP threads: torch is loaded first, and its libgomp
carries the plain name that the library asks for.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from ctypes import CDLL, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from kernels.reference import quantize_rows
from kernels.spans import Int32Array, Spans

_KINDS: Final = {"float32": 0, "bfloat16": 1, "int8": 2}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_POOL_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1}
_PLAIN, _ADD, _SILU_MUL = range(3)
_ITEM_ROWS: Final = 48  # rows (tokens times heads of a group) of a work item: enough arithmetic for each key read
_ALIGNMENT: Final = 64

_LONG, _POINTER, _INT, _FLOAT = c_long, c_void_p, c_int, c_float
_SIGNATURES: Final = {
    "baton_linear": (
        *(_POINTER, _LONG, _LONG, _POINTER, _INT, _POINTER, _POINTER, _LONG, _LONG),
        *(_POINTER, _LONG, _INT, _POINTER, _INT),
    ),
    "baton_pack": (_POINTER, _INT, _LONG, _LONG, _POINTER, _LONG, _INT, _INT),
    "baton_pack_values": (_POINTER, _LONG, _POINTER, _LONG, _INT),
    "baton_embed": (_POINTER, _LONG, _POINTER, _INT, _LONG, _POINTER),
    "baton_rms_norm": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _INT),
    "baton_rope_store": (
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT),
        *(_POINTER, _INT, _LONG, _LONG, _LONG, _POINTER, _INT),
    ),
    "baton_attention": (
        *(_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _INT, _LONG, _LONG),
        *(_POINTER, _POINTER, _LONG, _FLOAT, _INT),
    ),
    "baton_read": (_POINTER, _LONG, _INT),
    "baton_multiply_add": (_LONG, _FLOAT, _INT),
}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight as the kernels read it. ``num_outputs`` counts gate and up as one."""

    data: Tensor
    scales: Tensor | None
    bias: Tensor | None
    kind: int
    num_outputs: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        """What a step reads of it, padding included."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work items, longest first: int32 ``[num_items, 4]`` of first row, rows, context length, table start."""

    items: Int32Array
    block_ids: Int32Array
    num_heads: int


class Native:
    """Owns the memory of all weights it packed, until it goes."""

    name = "native"
    key_order: Literal["dim_major"] = "dim_major"

    def __init__(self, library: Path, threads: int) -> None:
        """``library`` from :func:`kernels.cpu.build.build`; ``threads`` of each call. Raises OSError if it cannot load."""
        self._lib = load_library(library)
        self._threads = threads
        self._panel: int = self._lib.baton_panel()
        self._arena = _Arena()

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
        return PackedLinear(data, scales, packed_bias, _KINDS[kind], stored, inputs)

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
        self._linear(x, weight, out, _PLAIN)

    def linear_add(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        self._linear(x, weight, out, _ADD)

    def linear_silu_mul(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        self._linear(x, weight, out, _SILU_MUL)

    def _linear(self, x: Tensor, weight: PackedLinear, out: Tensor, mode: int) -> None:
        assert x.shape[1] == weight.num_inputs
        assert out.shape[1] == weight.num_outputs
        self._lib.baton_linear(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            weight.data.data_ptr(),
            weight.kind,
            None if weight.scales is None else weight.scales.data_ptr(),
            None if weight.bias is None else weight.bias.data_ptr(),
            weight.num_outputs,
            weight.num_inputs,
            out.data_ptr(),
            out.stride(0),
            mode,
            None,
            self._threads,
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


def load_library(path: Path) -> CDLL:
    """Load a built library and declare its functions. Raises OSError."""
    library = CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    for name in ("baton_read", "baton_multiply_add"):
        getattr(library, name).restype = c_float
    return library


def _halves(row: int, count: int, outputs: int, gate_up: bool) -> list[tuple[int, int, int]]:
    """Rows ``row .. row + count - 1`` of a weight as runs (begin, end, half), cut where gates end and ups begin."""
    if not gate_up:
        return [(row, row + count, -1)]
    middle = outputs // 2
    runs = [(row, min(row + count, middle), 0), (max(row, middle), row + count, 1)]
    return [(begin, end, half) for begin, end, half in runs if begin < end]


class _Arena:
    """Zeroed memory on huge pages, given out from the front of large maps and never given back one by one.

    Weights are read from end to end at each step: with 4 KiB pages the TLB would miss every 64 cache lines.
    """

    _MAP_BYTES: Final = 64 << 20

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]``, at a cache line's start."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._left):
            memory = mmap.mmap(-1, max(rounded, self._MAP_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(memory, dtype=torch.uint8)
        taken = self._left[:num_bytes]
        self._left = self._left[rounded:]
        return taken
