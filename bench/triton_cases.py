"""Inputs for the Triton kernels and what `kernels.reference` makes of them, on any device.

The unit tests run them in the interpreter on the CPU, `bench/gpu_kernels.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import reference
from kernels.triton.activation import silu_mul
from kernels.triton.decode import DecodeWorkspace, paged_decode
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.prefill import paged_prefill
from kernels.triton.rope import apply_rope
from kernels.triton.store import store_kv

NUM_LAYERS: Final = 2
LAYER: Final = 1

# Of values around 1. The attention's weights are rounded to 16 bits before they meet the values.
ATTENTION_TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
# Two units in the last place: the interpreter truncates where torch rounds.
ROW_TOLERANCE: Final = {torch.float32: 3e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``error``: the largest of ``|found - expected| / max(1, |expected|)``, infinite if anything is not finite."""

    name: str
    error: float
    tolerance: float

    @property
    def good(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


def compare(name: str, found: Tensor, expected: Tensor, tolerance: float) -> Comparison:
    """Compare in float64; shapes must agree."""
    if found.shape != expected.shape:
        raise ValueError(f"{name}: {list(found.shape)} instead of {list(expected.shape)}")
    wide, target = found.double(), expected.double()
    if not wide.isfinite().all():
        return Comparison(name, float("inf"), tolerance)
    return Comparison(name, ((wide - target).abs() / target.abs().clamp(min=1)).max().item(), tolerance)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a model and the KV heads they share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"D{self.head_dim} {self.num_heads}/{self.num_kv_heads}"


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Chunks of several sequences over a pool whose unused slots are NaN.

    ``qkv``: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, as a fused projection leaves it.
    """

    heads: Heads
    pool: Tensor
    qkv: Tensor
    first_rows: Tensor
    row_counts: Tensor
    context_lens: Tensor
    block_tables: Tensor

    @property
    def q(self) -> Tensor:
        """The queries: rows apart from each other."""
        return self.qkv[:, : self.heads.num_heads]

    def expected(self) -> Tensor:
        """The reference's attention of every row, computed in float32."""
        block_size = self.pool.shape[4]
        spans = []
        columns = (self.first_rows.tolist(), self.row_counts.tolist(), self.context_lens.tolist())
        for index, (first, rows, context) in enumerate(zip(*columns, strict=True)):
            block_ids = self.block_tables[index, : -(-context // block_size)].long()
            spans.append(reference.attention_span(first, rows, context, block_ids))
        return reference.paged_attention(self.q.float(), self.pool.float(), LAYER, spans)

    def part(self, chunk: int, start: int, end: int) -> PagedBatch:
        """Rows ``start .. end - 1`` of one chunk as a batch of their own, over the same pool."""
        first, rows = int(self.first_rows[chunk]), int(self.row_counts[chunk])
        numbers = [0, end - start, int(self.context_lens[chunk]) - rows + end]
        first_rows, counts, contexts = torch.tensor(numbers, dtype=torch.int32, device=self.pool.device).split(1)
        own = self.qkv[first + start : first + end]
        tables = self.block_tables[chunk : chunk + 1]
        return PagedBatch(self.heads, self.pool, own, first_rows, counts, contexts, tables)

    def prefill(self) -> Tensor:
        """`paged_prefill` of the batch."""
        out = torch.full_like(self.q, float("nan"), memory_format=torch.contiguous_format)
        index = (self.first_rows, self.row_counts, self.context_lens, self.block_tables)
        paged_prefill(self.q, self.pool, LAYER, *index, int(self.row_counts.max()), out)
        return out

    def decode(self, workspace: DecodeWorkspace | None = None) -> Tensor:
        """`paged_decode` of the last row of each chunk; other rows are NaN."""
        if workspace is None:
            size = (len(self.context_lens), self.heads.num_heads, self.heads.head_dim, int(self.context_lens.max()))
            workspace = DecodeWorkspace(*size, self.pool.device)
        out = torch.full_like(self.q, float("nan"), memory_format=torch.contiguous_format)
        rows = self.first_rows + self.row_counts - 1
        paged_decode(self.q, self.pool, LAYER, rows, self.context_lens, self.block_tables, workspace, out)
        return out


def paged_batch(
    heads: Heads, dtype: torch.dtype, chunks: Sequence[tuple[int, int]], block_size: int, device: str = "cpu"
) -> PagedBatch:
    """Random chunks, each of (rows, context length), their blocks scattered over the pool.

    Block 0 is in no table: a kernel that reads past a table's end finds NaN there.
    """
    table_lens = [-(-context // block_size) for _, context in chunks]
    free = (1 + torch.randperm(sum(table_lens) + 2)).tolist()
    shape = (len(free) + 1, NUM_LAYERS, 2, heads.num_kv_heads, block_size, heads.head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    tables = torch.zeros(len(chunks), max(table_lens), dtype=torch.int32)
    for index, ((_, context), length) in enumerate(zip(chunks, table_lens, strict=True)):
        block_ids = torch.tensor([free.pop() for _ in range(length)])
        tables[index, :length] = block_ids.int()
        positions = torch.arange(context)
        slots = block_ids[positions // block_size] * block_size + positions % block_size
        k, v = torch.randn(2, context, heads.num_kv_heads, heads.head_dim, device=device).to(dtype).unbind(0)
        reference.store_kv(pool, LAYER, k, v, slots.to(device))
    counts = torch.tensor([rows for rows, _ in chunks], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in chunks], dtype=torch.int32)
    first_rows = counts.cumsum(0, dtype=torch.int32) - counts
    width = heads.num_heads + 2 * heads.num_kv_heads
    qkv = torch.randn(int(counts.sum()), width, heads.head_dim, device=device).to(dtype)
    first_rows, counts, contexts, tables = (one.to(device) for one in (first_rows, counts, contexts, tables))
    return PagedBatch(heads, pool, qkv, first_rows, counts, contexts, tables)


def attention(
    heads: Heads, dtype: torch.dtype, chunks: Sequence[tuple[int, int]], block_size: int, device: str = "cpu"
) -> list[Comparison]:
    """Prefill of the chunks, and decode of their last rows, against the reference."""
    batch = paged_batch(heads, dtype, chunks, block_size, device)
    expected, tolerance = batch.expected(), ATTENTION_TOLERANCE[dtype]
    last = (batch.first_rows + batch.row_counts - 1).long()
    name = f"{dtype} {heads}"
    return [
        compare(f"prefill {name}", batch.prefill(), expected, tolerance),
        compare(f"decode {name}", batch.decode()[last], expected[last], tolerance),
    ]


def norms(dtype: torch.dtype, num_rows: int, size: int, device: str = "cpu") -> list[Comparison]:
    """Norm, norm of heads inside a wider row, in place, and with the residual addition."""
    tolerance, eps = ROW_TOLERANCE[dtype], 1e-3
    weight = torch.randn(size, device=device).to(dtype)
    found = []
    wide = torch.randn(num_rows, 5, size, device=device).to(dtype)
    for name, x in (("rms_norm", wide[:, 0]), ("rms_norm heads", wide[:, 1:4])):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rms_norm(x, weight, eps, out)
        found.append(compare(name, out, reference.rms_norm(x, weight, eps), tolerance))
    x, residual = torch.randn(2, num_rows, size, device=device).to(dtype).unbind(0)
    total = residual + x
    expected = reference.rms_norm(total, weight, eps)
    add_rms_norm(x, residual, weight, eps, x)
    found.append(compare("add_rms_norm sum", residual, total, tolerance))
    # A last place of the sum weighs more in a row of few elements: one more of the tolerance.
    found.append(compare("add_rms_norm", x, expected, 2 * tolerance))
    return found


def activation(dtype: torch.dtype, num_rows: int, size: int, device: str = "cpu") -> list[Comparison]:
    """SiLU·mul."""
    gate_up = (3 * torch.randn(num_rows, 2 * size, device=device)).to(dtype)
    out = torch.empty(num_rows, size, dtype=dtype, device=device)
    silu_mul(gate_up, out)
    return [compare("silu_mul", out, reference.silu_mul(gate_up), ROW_TOLERANCE[dtype])]


def rope(heads: Heads, dtype: torch.dtype, num_tokens: int, device: str = "cpu") -> list[Comparison]:
    """Rotation in place of the queries and keys of a fused projection."""
    frequencies = 1e4 ** -(torch.arange(heads.head_dim // 2, device=device) / heads.head_dim * 2)
    cos, sin = reference.rope_tables(frequencies, 100)
    positions = torch.randint(0, 100, (num_tokens,), device=device)
    width = heads.num_heads + 2 * heads.num_kv_heads
    qkv = torch.randn(num_tokens, width, heads.head_dim, device=device).to(dtype)
    q, k, v = qkv.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    expected_q, expected_k = reference.apply_rope(q.float(), k.float(), positions, cos, sin)
    before = v.clone()
    apply_rope(q, k, positions, cos, sin, q, k)
    return [
        compare("rope q", q, expected_q, ROW_TOLERANCE[dtype]),
        compare("rope k", k, expected_k, ROW_TOLERANCE[dtype]),
        compare("rope leaves v alone", v, before, 0.0),
    ]


def store(heads: Heads, dtype: torch.dtype, block_size: int, device: str = "cpu") -> list[Comparison]:
    """Every slot written as the reference writes it, a padding row written nowhere."""
    shape = (6, NUM_LAYERS, 2, heads.num_kv_heads, block_size, heads.head_dim)
    found, expected = torch.zeros(2, *shape, dtype=dtype, device=device).unbind(0)
    slots = torch.tensor([5 * block_size + 3, 0, -1, 2 * block_size + 1], device=device)
    width = heads.num_heads + 2 * heads.num_kv_heads
    qkv = torch.randn(len(slots), width, heads.head_dim, device=device).to(dtype)
    _, k, v = qkv.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    store_kv(found, LAYER, k, v, slots)
    real = slots >= 0
    reference.store_kv(expected, LAYER, k[real], v[real], slots[real])
    return [compare("store_kv", found, expected, 0.0)]


def copied(copy: Callable[[], None], found: Tensor, expected: Tensor, name: str) -> Comparison:
    """Whether ``copy`` leaves ``expected``'s very bytes in ``found``."""
    copy()
    same = torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    return Comparison(name, 0.0 if same else float("inf"), 0.0)
