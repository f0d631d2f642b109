"""The Triton kernels on a real GPU: are they right, and how near do they come to what the device can do?

``python -m bench.gpu_kernels [--json FILE]``, under five minutes. Rates are set against the device's own copy and
matrix product rates, measured in the same run. Exit code 1 if a number is wrong, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from bench import triton_cases as cases
from bench.triton_cases import LAYER, Comparison, Heads, PagedBatch, compare, paged_batch
from bench.triton_step import OneLayerStep, inputs_of
from kernels.triton.activation import silu_mul
from kernels.triton.blocks import gather_blocks, scatter_blocks
from kernels.triton.decode import DecodeWorkspace, paged_decode
from kernels.triton.graphs import DecodeGraphs
from kernels.triton.norm import add_rms_norm
from kernels.triton.prefill import paged_prefill
from kernels.triton.rope import apply_rope
from kernels.triton.store import store_kv

DEVICE: Final = "cuda"
RUNS: Final = 20
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
HEADS: Final = (
    Heads(9, 3, 64),
    Heads(4, 1, 64),
    Heads(2, 2, 64),
    Heads(32, 8, 128),
    Heads(35, 1, 128),
    Heads(2, 2, 128),
)
CHUNKS: Final = ((5, 5), (1, 1), (1, 40), (7, 39), (133, 270), (1, 256), (1, 257), (1, 3000), (1500, 1500))
LLAMA_8B: Final = Heads(32, 8, 128)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; ``ratio`` = ``value / limit``, both medians or floors in ``unit``."""

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    runs: int


def check() -> Iterator[Comparison]:
    """Every kernel against the reference; then every row against itself in other company, bit for bit."""
    for dtype in DTYPES:
        for heads in HEADS:
            yield from cases.attention(heads, dtype, CHUNKS, 16, DEVICE)
            yield from cases.rope(heads, dtype, 33, DEVICE)
            yield from cases.store(heads, dtype, 16, DEVICE)
        for size in (1, 66, 576, 4096, 16384):
            yield from cases.norms(dtype, 33, size, DEVICE)
            yield from cases.activation(dtype, 33, size, DEVICE)
        yield from _independence(dtype)
        yield from _graphs(dtype)
    pool = torch.randint(0, 256, (9, 2, 2, 3, 16, 130), dtype=torch.uint8, device=DEVICE)
    block_ids = torch.tensor([4, 0, 8], device=DEVICE)
    staging = torch.zeros_like(pool[:3])
    yield cases.copied(lambda: gather_blocks(pool, block_ids, staging), staging, pool[block_ids], "gather_blocks")
    restored, expected = torch.zeros_like(pool), torch.zeros_like(pool)
    expected[block_ids] = staging
    yield cases.copied(lambda: scatter_blocks(staging, block_ids, restored), restored, expected, "scatter_blocks")


def _independence(dtype: torch.dtype) -> Iterator[Comparison]:
    batch = paged_batch(LLAMA_8B, dtype, CHUNKS, 16, DEVICE)
    prefill, decode = batch.prefill(), batch.decode()
    for chunk, (rows, _) in enumerate(CHUNKS):
        first = int(batch.first_rows[chunk])
        for start, end in ((0, rows), (0, rows // 3), (rows // 3, rows)):
            if start < end:
                name = f"{dtype} chunk {chunk} rows {start}..{end} in other company"
                part = batch.part(chunk, start, end).prefill()
                yield compare(f"prefill {name}", part, prefill[first + start : first + end], 0.0)
        last = batch.part(chunk, rows - 1, rows).decode()
        yield compare(f"decode {dtype} chunk {chunk} in other company", last[0], decode[first + rows - 1], 0.0)


def _graphs(dtype: torch.dtype) -> Iterator[Comparison]:
    batch = paged_batch(LLAMA_8B, dtype, [(1, length) for length in (20, 300, 1, 33, 1000)], 16, DEVICE)
    step = OneLayerStep(batch)
    expected = step(inputs_of(batch, [0, 1, 2, 3, 4]))
    graphs = DecodeGraphs(step, [1, 2, 5], 64, torch.device(DEVICE))
    for sequences in ([0, 1, 2, 3, 4], [2], [4, 1], [3, 0, 1]):
        found = graphs.run(inputs_of(batch, sequences))
        yield compare(f"{dtype} graph of {sequences}", found, expected[sequences], 0.0)


def median_ms(call: Callable[[], object]) -> float:
    """Median time of ``RUNS`` calls on the device, in milliseconds, after three that compile and warm up.

    Caches are cold, as between the layers of a model: something larger than any of them is written before each call.
    """
    cold = torch.empty(1 << 29, dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        call()
    times = []
    for _ in range(RUNS):
        cold.zero_()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def measure() -> Iterator[Row]:
    """Times over their floors: the bytes a call must move at the copy rate, or its products at the matmul rate."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    bytes_a_ms = 2 * source.numel() / median_ms(partial(torch.empty_like(source).copy_, source))
    yield _row("device_copy", bytes_a_ms / 1e6, bytes_a_ms / 1e6, "GB/s")
    square = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    flops_a_ms = 2 * 8192**3 / median_ms(partial(torch.matmul, square, square))
    yield _row("device_matmul", flops_a_ms / 1e9, flops_a_ms / 1e9, "TFLOP/s")
    del source, square
    for name, call, moved in _memory_bound():
        yield _row(name, median_ms(call), moved / bytes_a_ms, "ms")
    for batch_size, context in ((1, 8192), (1, 131072), (16, 4096), (64, 4096), (64, 256)):
        batch = paged_batch(LLAMA_8B, torch.bfloat16, [(1, context)] * batch_size, 16, DEVICE)
        moved = 2 * batch_size * context * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * batch.pool.itemsize
        yield _row(f"decode_attention b{batch_size} ctx{context}", median_ms(_decode(batch)), moved / bytes_a_ms, "ms")
    for rows, context in ((4096, 4096), (512, 8192)):
        batch = paged_batch(LLAMA_8B, torch.bfloat16, [(rows, context)], 16, DEVICE)
        seen = rows * (context - rows) + rows * (rows + 1) / 2
        flops = 4 * seen * LLAMA_8B.num_heads * LLAMA_8B.head_dim
        yield _row(f"prefill_attention {rows} ctx{context}", median_ms(_prefill(batch)), flops / flops_a_ms, "ms")
    batch = paged_batch(LLAMA_8B, torch.bfloat16, [(1, 256)] * 8, 16, DEVICE)
    step, inputs = OneLayerStep(batch), inputs_of(batch, list(range(8)))
    graphs = DecodeGraphs(step, [8], 16, torch.device(DEVICE))
    yield _row("graph_step b8 over eager", median_ms(lambda: graphs.run(inputs)), median_ms(lambda: step(inputs)), "ms")


def _row(name: str, value: float, limit: float, unit: str) -> Row:
    return Row(name, round(value, 4), unit, round(limit, 4), round(value / limit, 3), RUNS)


def _memory_bound() -> Iterator[tuple[str, Callable[[], object], int]]:
    """Name, call, and the bytes that it must read and write."""
    dtype, rows, size, inner = torch.bfloat16, 16384, 4096, 14336
    # 256 of 320 blocks of a Llama-3-8B: 2 MiB each.
    pool = torch.zeros(320, 32, 2, 8, 16, 128, dtype=dtype, device=DEVICE)
    staging = torch.zeros_like(pool[:256])
    block_ids = torch.randperm(320, device=DEVICE)[:256]
    yield "gather_blocks", partial(gather_blocks, pool, block_ids, staging), 2 * staging.nbytes
    yield "scatter_blocks", partial(scatter_blocks, staging, block_ids, pool), 2 * staging.nbytes
    x, residual = torch.zeros(2, rows, size, dtype=dtype, device=DEVICE).unbind(0)
    weight = torch.ones(size, dtype=dtype, device=DEVICE)
    yield "add_rms_norm", partial(add_rms_norm, x, residual, weight, 1e-5, x), 4 * x.nbytes
    gate_up, out = (torch.zeros(rows, width * inner, dtype=dtype, device=DEVICE) for width in (2, 1))
    yield "silu_mul", partial(silu_mul, gate_up, out), gate_up.nbytes + out.nbytes
    qkv = torch.zeros(rows, 48, 128, dtype=dtype, device=DEVICE)
    q, k, v = qkv.split((32, 8, 8), dim=1)
    positions, angles = torch.arange(rows, device=DEVICE), torch.zeros(rows, 64, device=DEVICE)
    rotated = 2 * (q.numel() + k.numel()) * qkv.itemsize + 2 * angles.nbytes
    yield "apply_rope", partial(apply_rope, q, k, positions, angles, angles, q, k), rotated
    wide = torch.zeros(rows // 16, 1, 2, 8, 16, 128, dtype=dtype, device=DEVICE)
    yield "store_kv", partial(store_kv, wide, 0, k, v, torch.randperm(rows, device=DEVICE)), 2 * wide.nbytes


def _decode(batch: PagedBatch) -> Callable[[], None]:
    heads, count = batch.heads, len(batch.context_lens)
    workspace = DecodeWorkspace(count, heads.num_heads, heads.head_dim, int(batch.context_lens.max()), DEVICE)
    out = torch.empty_like(batch.q, memory_format=torch.contiguous_format)
    index = (batch.first_rows, batch.context_lens, batch.block_tables)
    return partial(paged_decode, batch.q, batch.pool, LAYER, *index, workspace, out)


def _prefill(batch: PagedBatch) -> Callable[[], None]:
    out = torch.empty_like(batch.q, memory_format=torch.contiguous_format)
    index = (batch.first_rows, batch.row_counts, batch.context_lens, batch.block_tables)
    return partial(paged_prefill, batch.q, batch.pool, LAYER, *index, int(batch.row_counts.max()), out)


def main() -> int:
    """Check, measure, print, and write the rows to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write an array of rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here")
        return 2
    torch.manual_seed(3)
    checked = list(check())
    wrong = [one for one in checked if not one.good]
    for one in wrong:
        print(f"WRONG {one.name}: {one.error:.2e} is over {one.tolerance:.2e}")
    print(f"{torch.cuda.get_device_name()}: {len(checked) - len(wrong)} of {len(checked)} comparisons are right")
    rows = []
    for row in measure():
        rows.append(row)
        print(f"{row.name:34} {row.value:10.3f} {row.unit:8} limit {row.limit:10.3f}  ratio {row.ratio:.2f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
