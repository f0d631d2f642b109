"""Launchers refuse what their kernels could not address."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.triton.activation import silu_mul
from kernels.triton.blocks import gather_blocks, scatter_blocks
from kernels.triton.decode import DecodeWorkspace, paged_decode
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.prefill import paged_prefill
from kernels.triton.rope import apply_rope
from kernels.triton.store import store_kv

POOL = torch.zeros(3, 2, 2, 2, 4, 64)
Q, K, OUT = torch.zeros(2, 4, 64), torch.zeros(2, 2, 64), torch.zeros(2, 4, 64)
X, WEIGHT = torch.zeros(2, 8), torch.zeros(8)
IDS, INDEX = torch.arange(2), torch.ones(2, dtype=torch.int32)
TABLES = torch.zeros(2, 3, dtype=torch.int32)
ANGLES = torch.zeros(10, 32)
WORKSPACE = DecodeWorkspace(2, 4, 64, 12, "cpu")


def prefill(q=Q, pool=POOL, layer=0, index=INDEX, tables=TABLES, out=OUT):
    paged_prefill(q, pool, layer, INDEX, INDEX, index, tables, 1, out)


def decode(q=Q, pool=POOL, rows=INDEX, tables=TABLES, workspace=WORKSPACE, out=OUT):
    paged_decode(q, pool, 0, rows, INDEX, tables, workspace, out)


def rope(q=Q, k=K, positions=IDS, cos=ANGLES, out_q=Q, out_k=K):
    apply_rope(q, k, positions, cos, ANGLES, out_q, out_k)


REFUSED: dict[str, Callable[[], None]] = {
    "norm: weight of another size": lambda: rms_norm(X, torch.zeros(7), 1e-5, X),
    "norm: weight of another type": lambda: rms_norm(X, WEIGHT.half(), 1e-5, X),
    "norm: out of another shape": lambda: rms_norm(X, WEIGHT, 1e-5, torch.zeros(3, 8)),
    "norm: rows too long": lambda: rms_norm(torch.zeros(1, 20000), torch.zeros(20000), 1e-5, torch.zeros(1, 20000)),
    "norm: transposed": lambda: rms_norm(torch.zeros(8, 2).T, WEIGHT, 1e-5, X),
    "norm: integers": lambda: rms_norm(X.int(), WEIGHT.int(), 1e-5, X.int()),
    "norm: one dimension": lambda: rms_norm(WEIGHT, WEIGHT, 1e-5, WEIGHT),
    "norm: residual of another type": lambda: add_rms_norm(X, X.half(), WEIGHT, 1e-5, X),
    "norm: residual of heads": lambda: add_rms_norm(OUT, OUT, torch.zeros(64), 1e-5, OUT),
    "silu: odd": lambda: silu_mul(torch.zeros(2, 7), torch.zeros(2, 3)),
    "silu: out": lambda: silu_mul(torch.zeros(2, 8), torch.zeros(2, 8)),
    "rope: int32 positions": lambda: rope(positions=INDEX),
    "rope: other tokens": lambda: rope(positions=torch.arange(3)),
    "rope: half angles": lambda: rope(cos=ANGLES.half()),
    "rope: out like k": lambda: rope(out_q=K),
    "rope: head gaps": lambda: rope(q=torch.zeros(2, 8, 64)[:, ::2]),
    "rope: k of another type": lambda: rope(k=K.half(), out_k=K.half()),
    "store: layer": lambda: store_kv(POOL, 2, K, K, IDS),
    "store: heads": lambda: store_kv(POOL, 0, Q, Q, IDS),
    "store: type": lambda: store_kv(POOL.half(), 0, K, K, IDS),
    "store: pool with gaps": lambda: store_kv(POOL[:, :, :, :, :2], 0, K, K, IDS),
    "store: int32 slots": lambda: store_kv(POOL, 0, K, K, INDEX),
    "gather: other blocks": lambda: gather_blocks(POOL, IDS, torch.zeros(2, 2, 2, 2, 4, 32)),
    "gather: count": lambda: gather_blocks(POOL, IDS, POOL),
    "scatter: type": lambda: scatter_blocks(POOL[:2].half(), IDS, POOL),
    "scatter: int32 ids": lambda: scatter_blocks(POOL[:2], INDEX, POOL),
    "prefill: type": lambda: prefill(q=Q.half()),
    "prefill: head size": lambda: prefill(q=torch.zeros(2, 4, 32)),
    "prefill: uneven groups": lambda: prefill(q=torch.zeros(2, 3, 64), out=torch.zeros(2, 3, 64)),
    "prefill: wide heads": lambda: prefill(torch.zeros(2, 2, 256), torch.zeros(1, 1, 2, 2, 4, 256)),
    "prefill: int64 lengths": lambda: prefill(index=IDS),
    "prefill: tables of others": lambda: prefill(tables=TABLES[:1]),
    "prefill: negative layer": lambda: prefill(layer=-1),
    "prefill: out": lambda: prefill(out=OUT[:1]),
    "decode: int64 rows": lambda: decode(rows=IDS),
    "decode: float64": lambda: decode(Q.double(), POOL.double(), out=OUT.double()),
    "decode: small workspace": lambda: decode(workspace=DecodeWorkspace(1, 4, 64, 12, "cpu")),
    "decode: workspace of other heads": lambda: decode(workspace=DecodeWorkspace(2, 2, 64, 12, "cpu")),
    "decode: int64 tables": lambda: decode(tables=TABLES.long()),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_refused(call: Callable[[], None]) -> None:
    with pytest.raises(ValueError):
        call()


def test_an_empty_batch_is_nothing_to_do() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    rms_norm(X[:0], WEIGHT, 1e-5, X[:0])
    silu_mul(X[:0], X[:0, :4])
    rope(Q[:0], K[:0], IDS[:0], ANGLES, Q[:0], K[:0])
    store_kv(POOL, 0, K[:0], K[:0], IDS[:0])
    gather_blocks(POOL, IDS[:0], POOL[:0])
    paged_prefill(Q[:0], POOL, 0, none, none, none, TABLES[:0], 0, OUT[:0])
    paged_decode(Q[:0], POOL, 0, none, none, TABLES[:0], WORKSPACE, OUT[:0])
