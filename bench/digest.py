"""What a digest of a KV block costs: ``python -m bench.digest``. The limit is reading the block once."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from bench.measure import MIN_RUNS, Row
from kvtransfer.digest import DIGEST_MODES, BlockIdentity, Digester, DigestMode

BLOCK_BYTES = 737_280
# More than any cache holds, so that a block comes from memory unless it has just been written.
_NUM_BLOCKS = 512


def measure(runs: int) -> list[Row]:
    """Seconds per block, from memory and from cache, as µs; beside a sum over the same bytes."""
    pool = np.empty((_NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    pool[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
    words = pool.view(np.uint64)
    digester = Digester(pool, "full")
    rows = []
    for place, blocks in (("memory", range(_NUM_BLOCKS)), ("cache", [0] * _NUM_BLOCKS)):
        limit = _median_us(lambda block: words[block].sum(), blocks, runs)
        rows.append(Row(f"read_block_from_{place}", limit, "us", None, None, runs))
        for mode in DIGEST_MODES[1:]:
            spent = _median_us(partial(_take, digester, mode), blocks, runs)
            rows.append(Row(f"digest_{mode}_from_{place}", spent, "us", limit, spent / limit, runs))
    return rows


def _take(digester: Digester, mode: DigestMode, block: int) -> int:
    return digester.take(block, BlockIdentity(1, block, 1), mode)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.digest", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one array of rows")
    parser.add_argument("--runs", type=int, default=MIN_RUNS)
    options = parser.parse_args()
    rows = measure(options.runs)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    for row in rows:
        print(f"{row.name:28} {row.value:8.1f} µs per block of {BLOCK_BYTES} bytes")


def _median_us(work: Callable[[int], object], blocks: Sequence[int], runs: int) -> float:
    work(blocks[0])
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        for block in blocks:
            work(block)
        found.append((time.perf_counter() - began) / len(blocks) * 1e6)
    return statistics.median(found)


if __name__ == "__main__":
    main()
