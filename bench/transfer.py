"""`baton bench transfer`: KV blocks between two processes, each transport against the limit of this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from bench.measure import MIN_RUNS, Report, parser, prepare
from bench.transfer_ends import Ends, Road, Shape, Timing

DESCRIPTION = """Moves scattered KV blocks between two processes on two cores, over every transport, and next to each
run measures what it is held against: one core's memcpy of the same blocks for shared memory, a bare socket for TCP.
Then a real prefill node and a real decode node show what of a transfer is hidden behind compute. ratio = value / limit;
for times and costs smaller is better."""

ROADS = (
    Road("ucx_shm", "ucx", "shm"),
    Road("ucx_tcp", "ucx", "tcp", (("UCX_TLS", "tcp"),)),
    Road("nixl_shm", "nixl", "shm"),
    Road("nixl_tcp", "nixl", "tcp"),
    Road("tcp", "tcp", "tcp"),
)
SIZES = {"64k": 64 << 10, "512k": 512 << 10, "2m": 2 << 20}
COUNTS = (1, 16, 64, 256)
POOL_BYTES = 256 * SIZES["2m"]
# A run moves at least so much, so that a wake-up more or less does not decide.
RUN_BYTES = 64 << 20
MAX_REPEATS = 64
DIGESTS = ("sampled", "full")


@dataclass(frozen=True, slots=True)
class Case:
    """One row: so many blocks of that size over that road."""

    road: Road
    size: str
    count: int

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.road.name}_{self.size}_x{self.count}"

    @property
    def shape(self) -> Shape:
        """What one run moves."""
        block_bytes = SIZES[self.size]
        repeats = max(1, min(MAX_REPEATS, RUN_BYTES // (block_bytes * self.count)))
        return Shape(block_bytes, self.count, repeats)


@dataclass(frozen=True, slots=True)
class Runs:
    """Of one case: the transfers, and between them the limit."""

    transfers: list[Timing]
    limits: list[Timing]

    def rates(self, num_bytes: int) -> tuple[float, float]:
        """Median GB/s of both."""
        return _rate(self.transfers, num_bytes), _rate(self.limits, num_bytes)

    def cpu_ms_per_gb(self, num_bytes: int) -> tuple[float, float]:
        """Median CPU of both processes, for both."""
        return _cpu(self.transfers, num_bytes), _cpu(self.limits, num_bytes)


class TransferBench:
    """Measures what ``--only`` asks for and adds its rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._cpus = sorted(os.sched_getaffinity(0))
        self._report = Report(as_json=args.json)

    def run(self) -> None:
        """All rows."""
        wanted = [case for case in _cases() if any(self._wanted(name) for name in _row_names(case))]
        for road, cases in groupby(wanted, key=lambda case: case.road):
            self._road(road, list(cases))
        for digest in DIGESTS:
            if self._wanted(f"digest_{digest}_cost"):
                self._digest(digest)
        self._nodes()
        self._report.finish()

    def _wanted(self, name: str) -> bool:
        return self._args.only in name

    def _road(self, road: Road, cases: list[Case]) -> None:
        if road.scheme == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
            print(f"{road.name} left out: the extra nixl is not installed", file=sys.stderr)
            return
        with Ends(self._cpus, POOL_BYTES) as ends:
            for size, group in groupby(cases, key=lambda case: case.size):
                with ends.road(road, SIZES[size], POOL_BYTES // SIZES[size], "sampled"):
                    for case in group:
                        self._case(ends, case)

    def _case(self, ends: Ends, case: Case) -> None:
        runs = self._measure(ends, case)
        shape, count = case.shape, self._args.runs
        rate, limit_rate = runs.rates(shape.num_bytes)
        if self._wanted(case.name):
            self._report.add(case.name, rate, "GB/s", limit_rate, count)
        if case.count == 1 and self._wanted(f"{case.name}_us"):
            each_us = [median * 1e6 / shape.repeats for median in (_wall(runs.transfers), _wall(runs.limits))]
            self._report.add(f"{case.name}_us", each_us[0], "us", each_us[1], count)
        if (case.size, case.count) == ("512k", 64) and self._wanted(f"{case.name}_cpu"):
            cpu, limit_cpu = runs.cpu_ms_per_gb(shape.num_bytes)
            self._report.add(f"{case.name}_cpu", cpu, "ms/GB", limit_cpu, count)

    def _measure(self, ends: Ends, case: Case) -> Runs:
        """The limit before each run of the transfer, so that a neighbour's noise hits both."""
        limit = ends.raw_socket if case.road.required == "tcp" else ends.memcpy
        limit(case.shape)
        ends.transfer(case.shape)
        runs = Runs([], [])
        for _ in range(self._args.runs):
            runs.limits.append(limit(case.shape))
            runs.transfers.append(ends.transfer(case.shape))
        return runs

    def _digest(self, digest: str) -> None:
        """What digests add to a transfer over TCP: an end's time for them (the mean of both) over the wall time.

        Both ends take theirs at the same time, each on its own core, while the other one's bytes travel.
        """
        case = Case(ROADS[-1], "512k", 64)
        with Ends(self._cpus, POOL_BYTES) as ends, ends.road(case.road, SIZES["512k"], 256, digest):
            ends.transfer(case.shape)
            timings = [ends.transfer(case.shape) for _ in range(self._args.runs)]
        each_ms = [1e3 / case.shape.repeats * value for value in (_digest_s(timings) / 2, _wall(timings))]
        self._report.add(f"digest_{digest}_cost", each_ms[0], "ms", each_ms[1], len(timings))

    def _nodes(self) -> None:
        from bench.transfer_nodes import ROWS, measure_nodes

        if any(self._wanted(name) for name in ROWS):
            for name, value, unit, limit in measure_nodes(self._cpus, self._args.model, self._args.runs):
                if self._wanted(name):
                    self._report.add(name, value, unit, limit, self._args.runs)


def _cases() -> Iterator[Case]:
    for road in ROADS:
        for size in SIZES:
            for count in COUNTS:
                yield Case(road, size, count)


def _row_names(case: Case) -> tuple[str, ...]:
    return (case.name, f"{case.name}_us", f"{case.name}_cpu")


def _wall(timings: list[Timing]) -> float:
    return statistics.median(timing.seconds for timing in timings)


def _digest_s(timings: list[Timing]) -> float:
    return statistics.median(timing.digest_seconds for timing in timings)


def _rate(timings: list[Timing], num_bytes: int) -> float:
    return num_bytes / _wall(timings) / 1e9


def _cpu(timings: list[Timing], num_bytes: int) -> float:
    return statistics.median(timing.cpu_seconds for timing in timings) * 1e3 / (num_bytes / 1e9)


def main() -> int:
    """Entry point; returns the exit status."""
    made = parser("transfer", DESCRIPTION)
    made.set_defaults(runs=MIN_RUNS)
    made.add_argument("--model", default="smollm2-135m", help="name or directory, for the rows with real nodes")
    args = made.parse_args()
    if args.realtime:
        # Not the real-time class: there, threads of one process do not pre-empt each other on the core they share.
        args.realtime = False
        os.setpriority(os.PRIO_PROCESS, 0, -19)
    prepare(args)
    began = time.monotonic()
    TransferBench(args).run()
    print(f"{time.monotonic() - began:.0f} s in all", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
