"""The contract: every backend computes what the reference's formulas say, at sizes nothing divides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from kernels.backend import Backend, BackendError  # noqa: E402
from kernels.decoder import DecoderLayer, DecoderStep, run_layers  # noqa: E402
from kernels.reference import (  # noqa: E402
    apply_rope,
    attention_span,
    kv_views,
    paged_attention,
    quantize_rows,
    rms_norm,
    rope_tables,
)
from kernels.spans import Spans  # noqa: E402
from tests import backends  # noqa: E402

SMALL = backends.INTERPRETED
KINDS = ("float32", "bfloat16", "int8")
# Query heads, KV heads, head size: GQA, MQA, MHA; the sizes of real models, and ones that no vector divides.
HEADS = [(9, 3, 64), (8, 2, 128), (4, 1, 64), (3, 3, 16), (6, 2, 80), (4, 2, 4), (5, 1, 20)]
if SMALL:
    HEADS = [(3, 1, 64), (2, 2, 16), (4, 2, 4), (5, 1, 20)]


@pytest.fixture(params=backends.NAMES)
def ops(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = backends.make(request.param)
    with made.device:  # where the tests' own tensors are made
        yield made


def pack(ops: Backend, parts: list[torch.Tensor], kind: Any, bias: torch.Tensor | None, *, gate_up: bool) -> Any:
    """The packed weight, or None if the backend refuses weights of that kind, by both of its methods."""
    shape = (sum(map(len, parts)), parts[0].shape[1])
    if ops.name == "triton" and kind == "int8":
        with pytest.raises(BackendError, match="no int8 weights"):
            ops.pack(iter(parts), shape, kind, bias, gate_up=gate_up)
        with pytest.raises(BackendError, match="no int8 weights"):
            ops.row_dtype(kind)
        return None
    assert ops.row_dtype(kind).is_floating_point
    return ops.pack(iter(parts), shape, kind, bias, gate_up=gate_up)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def as_stored(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What a weight of that kind stands for."""
    if kind == "int8":
        values, scales = quantize_rows(weight)
        return values.float() * scales[:, None]
    return weight.bfloat16().float() if kind == "bfloat16" else weight


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 15, 16, 33, 150])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: Backend, num_rows: int, kind: Any, bias: bool) -> None:
    parts = [torch.randn(rows, 51) for rows in (40, 9, 24)]
    offset = torch.randn(73) if bias else None
    if (weight := pack(ops, parts, kind, offset, gate_up=False)) is None:
        return
    x, before = torch.randn(num_rows, 51), torch.randn(num_rows, 73)
    expected = F.linear(x, as_stored(torch.cat(parts), kind), offset)
    out = torch.full((num_rows, 73), float("nan"))
    ops.linear(x, weight, out)
    assert torch.allclose(out, expected, atol=1e-4)
    out.copy_(before)
    ops.linear_add(x, weight, out)
    assert torch.allclose(out, expected + before, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 5, 20])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [24, 7, 64])
def test_linear_silu_mul(ops: Backend, num_rows: int, kind: Any, size: int) -> None:
    gate, up = torch.randn(2, size, 33).unbind(0)
    x = torch.randn(num_rows, 33) * 3
    out = torch.empty(num_rows, size)
    if (weight := pack(ops, [gate, up], kind, None, gate_up=True)) is None:
        return
    ops.linear_silu_mul(x, weight, out)
    expected = F.silu(x @ as_stored(gate, kind).T) * (x @ as_stored(up, kind).T)
    assert torch.allclose(out, expected, atol=1e-3, rtol=1e-5)


# Infinity is what the formula needs there; numpy, which interprets Triton, warns of it.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_of_great_numbers(ops: Backend) -> None:
    gate = torch.tensor([[-1e4], [-90.0], [0.0], [90.0], [1e4]])
    weight = ops.pack([gate, torch.ones(5, 1)], (10, 1), "float32", None, gate_up=True)
    out = torch.empty(1, 5)
    ops.linear_silu_mul(torch.ones(1, 1), weight, out)
    assert torch.allclose(out, F.silu(gate.T), atol=1e-30)


def test_a_weight_of_another_size_is_refused(ops: Backend) -> None:
    with pytest.raises(ValueError):
        ops.pack([torch.zeros(3, 4)], (5, 4), "float32", None, gate_up=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed(ops: Backend, dtype: torch.dtype) -> None:
    table = torch.randn(11, 19).to(dtype)
    token_ids = torch.tensor([3, 10, 0, 3])
    out = torch.empty(4, 19)
    ops.embed(token_ids, table, out)
    assert torch.equal(out, table[token_ids].float())


@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 50), (12, 576), (9, 5)])
def test_rms_norm(ops: Backend, num_rows: int, size: int) -> None:
    x, delta, weight = torch.randn(num_rows, size) * 4, torch.randn(num_rows, size), torch.randn(size)
    out = torch.empty(num_rows, size)
    ops.rms_norm(x, weight, 1e-5, out)
    assert torch.allclose(out, rms_norm(x, weight, 1e-5), atol=1e-5)
    total = x + delta
    ops.rms_norm(x, weight, 1e-5, out, delta=delta)
    assert torch.equal(x, total)
    assert torch.allclose(out, rms_norm(total, weight, 1e-5), atol=1e-5)
    rows = torch.tensor([num_rows - 1, 0])
    ops.rms_norm(x, weight, 1e-5, out[:2] if num_rows > 1 else (out := torch.empty(2, size)), rows=rows)
    assert torch.allclose(out[:2], rms_norm(x[rows], weight, 1e-5), atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ["plain", "norms", "no position"])
def test_rope_store(ops: Backend, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, options: str) -> None:
    block_size, num_rows = 16, 10
    pool = torch.zeros(6, 2, 2, kv_heads, block_size, dim, dtype=dtype)
    slots = torch.randperm(6 * block_size)[:num_rows]
    positions = torch.randint(0, 100, (num_rows,))
    angles = None if options == "no position" else rope_tables(torch.rand(dim // 2), 100)
    norms = (torch.randn(dim), torch.randn(dim), 1e-6) if options == "norms" else None
    qkv = torch.randn(num_rows, (heads + 2 * kv_heads) * dim)
    q, k, v = qkv.clone().view(num_rows, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    if angles is not None:
        q, k = apply_rope(q, k, positions, *angles)
    ops.rope_store(qkv, positions, angles, norms, pool, 1, slots)
    assert torch.allclose(qkv[:, : heads * dim].view_as(q), q, atol=1e-5)
    for view, expected in zip(kv_views(pool, ops.key_order), (k, v), strict=True):
        stored = view[slots // block_size, 1, :, slots % block_size]
        assert torch.allclose(stored.float(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2)
        view[slots // block_size, 1, :, slots % block_size] = 0
    assert not pool.any()


LENGTHS = [(5, 5), (1, 1), (1, 40), (7, 39), (33, 33), (1, 129), (70, 150), (2, 65), (1, 64)]  # rows, context
if SMALL:
    LENGTHS = [(5, 5), (1, 1), (7, 39), (1, 33), (2, 65), (1, 300)]


def mixed_batch(pool: torch.Tensor) -> tuple[Spans, int]:
    """Whole prompts, later chunks and single rows over random blocks of a filled pool."""
    block_size = pool.shape[4]
    free = torch.randperm(len(pool)).tolist()
    tables = [[free.pop() for _ in range(-(-context // block_size))] for _, context in LENGTHS]
    rows = np.array([rows for rows, _ in LENGTHS], dtype=np.int32)
    return Spans(
        first_rows=np.cumsum(rows, dtype=np.int32) - rows,
        num_rows=rows,
        context_lens=np.array([context for _, context in LENGTHS], dtype=np.int32),
        table_starts=np.cumsum([0, *map(len, tables)], dtype=np.int32),
        block_ids=np.array([block for table in tables for block in table], dtype=np.int32),
    ), int(rows.sum())


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(ops: Backend, heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    pool = torch.randn(160, 2, 2, kv_heads, block_size, dim).to(dtype)
    spans, num_rows = mixed_batch(pool)
    wiped = torch.ones(len(pool), block_size, dtype=torch.bool)
    reference = []
    for i, (rows, context) in enumerate(LENGTHS):
        table = torch.tensor(spans.block_ids[spans.table_starts[i] : spans.table_starts[i + 1]]).long()
        reference.append(attention_span(int(spans.first_rows[i]), rows, context, table))
        positions = torch.arange(context)
        wiped[table[positions // block_size], positions % block_size] = False
    # What nobody may look at is poison.
    for view in kv_views(pool, ops.key_order):
        view[:, 1].transpose(1, 2)[wiped] = float("nan")
    qkv = torch.randn(num_rows, (heads + 2 * kv_heads) * dim)
    out = torch.empty(num_rows, heads * dim)
    ops.attention(qkv, pool, 1, ops.plan(spans, heads, kv_heads), out)
    q = qkv[:, : heads * dim].view(num_rows, heads, dim)
    expected = paged_attention(q, pool, 1, reference, ops.key_order)
    assert torch.allclose(out.view_as(q), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_run_is_the_operations_one_by_one(ops: Backend, kind: Any) -> None:
    """Bit for bit, norms of queries and keys and a layer without position included."""
    hidden, inner, heads, kv_heads, dim = 48, 40, 4, 2, 16
    sizes = {"qkv": (128, hidden), "output": (hidden, 64), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    layers = []
    for rope, normed in ((True, True), (False, False), (True, False)):
        packed = {
            name: pack(ops, [torch.randn(shape) / 8], kind, torch.randn(shape[0]), gate_up=name == "gate_up")
            for name, shape in sizes.items()
        }
        if None in packed.values():
            return
        norms = [torch.randn(size) for size in (hidden, hidden, dim, dim)]
        query_norm, key_norm = norms[2:] if normed else (None, None)
        layers.append(
            DecoderLayer(norms[0], query_norm=query_norm, key_norm=key_norm, post_norm=norms[1], rope=rope, **packed)
        )
    pool = torch.randn(160, 3, 2, kv_heads, 16, dim)
    spans, num_rows = mixed_batch(pool)
    start = torch.randn(num_rows, hidden)
    slots = torch.randperm(160 * 16)[:num_rows]
    results = []
    for run in (lambda step: ops.run(ops.stack(layers), step), lambda step: run_layers(ops, layers, step)):
        step = DecoderStep(
            x=start.clone(),
            hidden=torch.empty(num_rows, hidden),
            qkv=torch.empty(num_rows, 128),
            attended=torch.empty(num_rows, 64),
            inner=torch.empty(num_rows, inner),
            positions=torch.arange(num_rows),
            slots=slots,
            angles=rope_tables(torch.linspace(0.1, 0.9, dim // 2), 200),
            eps=1e-5,
            pool=pool.clone(),
            plan=ops.plan(spans, heads, kv_heads),
        )
        run(step)
        results.append((step.x, step.pool))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0].isfinite().all()
