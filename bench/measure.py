"""What all compute benchmarks share: timing, the machine's two limits, and rows of results."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MIN_RUNS = 5
STREAM_BYTES = 512 << 20
_GEMM_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Row:
    """One result. ``ratio`` = ``value / limit``; both None where a row only states what the machine can do."""

    name: str
    value: float
    unit: str
    limit: float | None
    ratio: float | None
    runs: int


class Machine:
    """What this machine reaches: bytes a second read, operations a second in a float32 GEMM.

    Neighbours of a virtual machine take bandwidth by the second, so it is read again beside each row: a floor from
    one moment says nothing of a step at another.
    """

    def __init__(self, read: Callable[[], object], flops_per_s: float) -> None:
        """``read`` reads :data:`STREAM_BYTES` bytes from end to end."""
        self._read = read
        self.flops_per_s = flops_per_s
        self.bytes_per_s = 0.0

    def watch(self, work: Callable[[], object], runs: int) -> list[float]:
        """Seconds of each run of ``work``, with a stream read between them; sets ``bytes_per_s`` to their median."""
        work()
        found, reads = [], []
        for _ in range(runs):
            reads += _timed(self._read)
            found += _timed(work)
        self.bytes_per_s = STREAM_BYTES / statistics.median(reads)
        return found

    def floor_ms(self, weight_bytes: float, flops: float, kv_bytes: float = 0.0) -> float:
        """The shortest a step can take: weights and arithmetic overlap, the cache is read besides."""
        work = max(weight_bytes / self.bytes_per_s, flops / self.flops_per_s)
        return (work + kv_bytes / self.bytes_per_s) * 1e3


def _timed(work: Callable[[], object]) -> list[float]:
    began = time.perf_counter()
    work()
    return [time.perf_counter() - began]


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product and how many operations it is."""

    flops: float
    work: Callable[[], object]


class Report:
    """Collects rows; prints each as it comes, or all as JSON at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._rows: list[Row] = []

    def add(self, name: str, value: float, unit: str, limit: float | None = None, runs: int = 1) -> Row:
        """Record one result."""
        row = Row(name, value, unit, limit, None if limit is None else value / limit, runs)
        if not self._as_json:
            if not self._rows:
                print(f"{'':34}{'value':>11} {'unit':6}{'limit':>11}{'ratio':>8}{'runs':>6}")
            tail = "" if row.limit is None else f"{row.limit:11.3f}{row.ratio:8.3f}"
            print(f"{name:34}{value:11.3f} {unit:6}{tail:19}{runs:6}", flush=True)
        self._rows.append(row)
        return row

    def finish(self) -> None:
        """Print the JSON array, if that was asked for."""
        if self._as_json:
            json.dump([asdict(row) for row in self._rows], sys.stdout, indent=1)
            print()


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options of every compute benchmark."""
    made = argparse.ArgumentParser(prog=f"baton bench {name}", description=description)
    made.add_argument("--json", action="store_true", help="one JSON array of rows on standard output")
    made.add_argument("--runs", type=int, default=7, metavar="N", help="timed runs of each row, at least 5")
    made.add_argument("--threads", type=int, default=0, help="default: one per CPU this process may use")
    made.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains TEXT")
    made.add_argument(
        "--realtime", action="store_true", help="run at real-time priority: for a machine that is busy otherwise"
    )
    return made


def prepare(args: argparse.Namespace) -> None:
    """Set priority and threads. Must run before torch is imported."""
    args.runs = max(MIN_RUNS, args.runs)
    args.threads = args.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def times_s(work: Callable[[], object], runs: int) -> list[float]:
    """Seconds of each of ``runs`` runs, after one that is not counted."""
    work()
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def median_ms(work: Callable[[], object], runs: int) -> float:
    """Median milliseconds of ``runs`` runs."""
    return statistics.median(times_s(work, runs)) * 1e3


def huge_floats(num_floats: int) -> Tensor:
    """Zeroed float32 memory on huge pages, as the weights have."""
    import torch

    memory = mmap.mmap(-1, num_floats * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).zero_()


def measure_machine(report: Report, reader: Callable[[int, int], object], gemms: Sequence[Gemm], runs: int) -> Machine:
    """Stream bandwidth, the median, and GEMM peak, the best of all runs and of all products that compete.

    ``reader(pointer, num_bytes)`` reads memory from end to end; ``gemms`` compete with torch's own.
    """
    import torch

    memory = huge_floats(STREAM_BYTES // 4)
    a = torch.randn(_GEMM_SIZE, _GEMM_SIZE)
    out = torch.empty_like(a)
    own = Gemm(2.0 * _GEMM_SIZE**3, lambda: torch.mm(a, a, out=out))
    peak = max(gemm.flops / min(times_s(gemm.work, runs)) for gemm in (own, *gemms))
    machine = Machine(lambda: reader(memory.data_ptr(), STREAM_BYTES), peak)
    machine.watch(lambda: None, runs)
    report.add("stream_bandwidth", machine.bytes_per_s / 1e9, "GB/s", runs=runs)
    report.add("gemm_peak", peak / 1e9, "GF/s", runs=runs)
    return machine
