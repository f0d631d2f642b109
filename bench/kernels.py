"""`baton bench kernels`: every operation alone at the demo model's shapes, weights cold, against the limits."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.measure import Gemm, Machine, Report, measure_machine, parser, prepare

if TYPE_CHECKING:
    from kernels.backend import WeightKind

DESCRIPTION = """Time of each operation at SmolLM2-135M's shapes, for one layer among many (weights and cache cold), its
floor on this machine and the ratio."""

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 576, 1536, 9, 3, 64, 16
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


class KernelBench:
    """The native backend, operation by operation."""

    def __init__(self, args: Any) -> None:
        from cluster.config import cache_dir
        from kernels.cpu.build import build
        from kernels.cpu.native import Native

        self._args = args
        self._report = Report(as_json=args.json)
        library = build(cache_dir() / "kernels")
        self._fresh: Callable[[], Any] = lambda: Native(library, args.threads)
        self._machine = self._measure_machine()

    def run(self) -> None:
        """All rows."""
        for kind in ("float32", "bfloat16", "int8"):
            self._linears(kind)
        self._attentions()
        self._small_ones()
        self._report.finish()

    def _measure_machine(self) -> Machine:
        import torch

        ops, threads = self._fresh(), self._args.threads
        weight = ops.pack([torch.randn(2 * INNER, HIDDEN)], (2 * INNER, HIDDEN), "float32", None, gate_up=False)
        x, out = torch.randn(1024, HIDDEN), torch.empty(1024, 2 * INNER)
        own = Gemm(2.0 * 1024 * HIDDEN * 2 * INNER, lambda: ops.linear(x, weight, out))
        return measure_machine(self._report, lambda at, size: ops.read(at, size, threads), [own], self._args.runs)

    def _time(self, name: str, one: Callable[[int], object], num_bytes: float, flops: float) -> None:
        """``one(layer)`` for every layer, reported for one of them."""
        if self._args.only not in name:
            return

        def all_layers() -> None:
            for layer in range(LAYERS):
                one(layer)

        seconds = self._machine.watch(all_layers, self._args.runs)
        floor = self._machine.floor_ms(num_bytes, flops)
        self._report.add(name, statistics.median(seconds) / LAYERS * 1e3, "ms", floor, len(seconds))

    def _linears(self, kind: WeightKind) -> None:
        import torch

        ops = self._fresh()
        shape = (2 * INNER, HIDDEN)
        weights = [ops.pack([torch.randn(shape)], shape, kind, None, gate_up=True) for _ in range(LAYERS)]
        for rows in (1, 4, 16, 32, 64, 256, 1024):
            x, out = torch.randn(rows, HIDDEN), torch.empty(rows, INNER)
            parameters = 2.0 * INNER * HIDDEN
            self._time(
                f"gate_up_{kind}_m{rows}",
                lambda layer, x=x, out=out: ops.linear_silu_mul(x, weights[layer], out),  # type: ignore[misc]
                parameters * _ITEM_BYTES[kind],
                2 * parameters * rows,
            )

    def _attentions(self) -> None:
        import numpy as np
        import torch

        from kernels.spans import Spans

        ops = self._fresh()
        for dtype in (torch.float32, torch.bfloat16):
            pool = torch.randn(2048, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
            for batch, rows, context in ((1, 1, 1024), (16, 1, 1024), (32, 1, 1024), (32, 1, 256), (1, 1024, 1024)):
                blocks = np.random.default_rng(0).permutation(len(pool))[: batch * context // BLOCK_SIZE]
                spans = Spans(
                    first_rows=np.arange(batch, dtype=np.int32) * rows,
                    num_rows=np.full(batch, rows, dtype=np.int32),
                    context_lens=np.full(batch, context, dtype=np.int32),
                    table_starts=np.arange(batch + 1, dtype=np.int32) * (context // BLOCK_SIZE),
                    block_ids=blocks.astype(np.int32),
                )
                plan = ops.plan(spans, HEADS, KV_HEADS)
                qkv = torch.randn(batch * rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
                out = torch.empty(batch * rows, HEADS * HEAD_DIM)
                kind = "prefill" if rows > 1 else "decode"
                pairs = batch * (rows * context - rows * (rows - 1) / 2)
                self._time(
                    f"attention_{kind}_{str(dtype).removeprefix('torch.')}_b{batch}_ctx{context}",
                    lambda layer, qkv=qkv, out=out, plan=plan, pool=pool: ops.attention(  # type: ignore[misc]
                        qkv, pool, layer, plan, out
                    ),
                    2.0 * batch * context * KV_HEADS * HEAD_DIM * dtype.itemsize,
                    4.0 * pairs * HEADS * HEAD_DIM,
                )

    def _small_ones(self) -> None:
        import torch

        from kernels.reference import rope_tables

        ops = self._fresh()
        pool = torch.zeros(64, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        angles = rope_tables(torch.rand(HEAD_DIM // 2), 2048)
        for rows in (1, 32, 512):
            x, out, weight = torch.randn(rows, HIDDEN), torch.empty(rows, HIDDEN), torch.randn(HIDDEN)
            self._time(
                f"rms_norm_m{rows}",
                lambda _layer, x=x, out=out, weight=weight: ops.rms_norm(x, weight, 1e-5, out),  # type: ignore[misc]
                2.0 * rows * HIDDEN * 4,
                0.0,
            )
            qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
            slots = torch.randperm(64 * BLOCK_SIZE)[:rows]
            self._time(
                f"rope_store_m{rows}",
                lambda layer, qkv=qkv, slots=slots: ops.rope_store(  # type: ignore[misc]
                    qkv, slots, angles, None, pool, layer, slots
                ),
                2.0 * rows * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 4,
                0.0,
            )


def main() -> int:
    """Entry point; returns the exit status."""
    args = parser("kernels", DESCRIPTION).parse_args()
    prepare(args)
    KernelBench(args).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
