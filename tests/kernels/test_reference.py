from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from kernels import reference  # noqa: E402
from kernels.reference import (  # noqa: E402
    Linear,
    apply_rope,
    attention_span,
    paged_attention,
    rms_norm,
    rope_tables,
    silu_mul,
    store_kv,
)

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 2, 8


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(70, 50).to(dtype)
    offset = torch.randn(70).to(dtype) if bias else None
    x = torch.randn(num_rows, 50).to(dtype)
    found = Linear(weight, offset)(x)
    assert found.dtype == dtype
    assert torch.allclose(found, F.linear(x, weight, offset), atol=1e-5 if dtype == torch.float32 else 0.2)


def test_linear_without_packing_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(70, 50), torch.randn(5, 50)
    packed = Linear(weight)(x)
    monkeypatch.setattr(reference, "_can_pack", lambda _weight: False)
    assert torch.allclose(Linear(weight)(x), packed, atol=1e-5)


def test_rms_norm() -> None:
    x, weight = torch.randn(4, 5, 6), torch.randn(6)
    expected = torch.stack([row / (row.pow(2).mean() + 1e-3).sqrt() * weight for row in x.view(-1, 6)]).view(4, 5, 6)
    assert torch.allclose(rms_norm(x, weight, 1e-3), expected, atol=1e-6)
    assert rms_norm(x.bfloat16(), weight.bfloat16(), 1e-3).dtype == torch.bfloat16


def test_silu_mul() -> None:
    gate_up = torch.randn(3, 10)
    gate, up = gate_up[:, :5], gate_up[:, 5:]
    assert torch.allclose(silu_mul(gate_up), gate * torch.sigmoid(gate) * up, atol=1e-6)


def test_rope_rotates_pairs_by_their_position() -> None:
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos, sin = rope_tables(frequencies, 100)
    positions = torch.tensor([0, 7, 99])
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    rotated_q, rotated_k = apply_rope(q, k, positions, cos, sin)
    for x, rotated in ((q, rotated_q), (k, rotated_k)):
        pairs = torch.complex(x[..., :4], x[..., 4:])
        turn = torch.polar(torch.ones(3, 1, 4), (positions[:, None] * frequencies)[:, None])
        expected = torch.view_as_real(pairs * turn)
        assert torch.allclose(rotated, torch.cat((expected[..., 0], expected[..., 1]), -1), atol=1e-5)


@pytest.mark.parametrize("block_size", [4, 16])
def test_store_kv_writes_exactly_its_slots(block_size: int) -> None:
    pool = torch.zeros(6, NUM_LAYERS, 2, NUM_KV_HEADS, block_size, HEAD_DIM)
    slots = torch.tensor([5 * block_size + 3, 0, 2 * block_size + 1])
    k, v = torch.randn(2, 3, NUM_KV_HEADS, HEAD_DIM).unbind(0)
    store_kv(pool, 1, k, v, slots)
    for row, slot in enumerate(slots.tolist()):
        at = (slot // block_size, slot % block_size)
        assert torch.equal(pool[at[0], 1, 0, :, at[1]], k[row])
        assert torch.equal(pool[at[0], 1, 1, :, at[1]], v[row])
        pool[at[0], 1, :, :, at[1]] = 0
    assert not pool.any()


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_paged_attention_equals_dense_attention(block_size: int) -> None:
    """Whole prompts, later chunks and single rows in one batch, against the formula written out."""
    lengths = [(5, 5), (1, 1), (1, 40), (7, 39), (33, 33), (1, block_size), (2, block_size + 1)]  # rows, context
    num_blocks = 60
    pool = torch.full((num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, block_size, HEAD_DIM), float("nan"))
    free = torch.randperm(num_blocks).tolist()
    q = torch.randn(sum(rows for rows, _ in lengths), NUM_KV_HEADS * GROUP, HEAD_DIM)
    spans, expected, first_row = [], [], 0
    for rows, context_len in lengths:
        k, v = torch.randn(2, context_len, NUM_KV_HEADS, HEAD_DIM).unbind(0)
        table = torch.tensor([free.pop() for _ in range(-(-context_len // block_size))])
        positions = torch.arange(context_len)
        store_kv(pool, 1, k, v, table[positions // block_size] * block_size + positions % block_size)
        spans.append(attention_span(first_row, rows, context_len, table))
        for row in range(rows):
            seen = context_len - rows + row + 1
            for head in range(NUM_KV_HEADS * GROUP):
                keys, values = k[:seen, head // GROUP], v[:seen, head // GROUP]
                weights = (keys @ q[first_row + row, head] / HEAD_DIM**0.5).softmax(0)
                expected.append(weights @ values)
        first_row += rows
    found = paged_attention(q, pool, 1, spans)
    assert found.shape == q.shape
    assert torch.allclose(found.view(-1, HEAD_DIM), torch.stack(expected), atol=1e-5)
