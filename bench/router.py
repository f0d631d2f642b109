"""`baton bench router`: what the router adds, and how many streams one of its processes can carry."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.measure import MIN_RUNS, Report
from bench.node_start import ROOT, redis_server
from bench.router_client import NUM_TOKENS, Connection, Rate, Seen, Server, frames_of, request_bytes, throughput
from bench.router_direct import Direct
from bench.router_nodes import Stamps
from bench.router_peers import REQUEST, programs, running
from cluster.config import ENV_REDIS_URL, ENV_SECRET
from cluster.model_store import resolve_model

DESCRIPTION = """A real router over nodes without engines, on a core of its own. Latency at concurrency 1 over a direct
conversation with the same nodes; requests and tokens a second at concurrency 32 next to a bare uvicorn app that streams
the very same frames, in turns."""

CONCURRENCY = 32
STEP_S = 0.002
LATENCY_REQUESTS = 40
THROUGHPUT_S = 3.0
FIRST_LIMIT_MS, TOKEN_LIMIT_MS = 2.0, 0.3


async def bench(args: argparse.Namespace, report: Report, folder: Path, url: str) -> None:
    """All rows, over the Redis at ``url``."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]})
    async with _router(url, args.model, cpus[0]) as router:
        port = router.port
        stamps_file = folder / "stamps"
        stamps = Stamps(stamps_file)
        with _nodes(url, STEP_S, cpus[-1], stamps_file):
            frames = await _frames(port)
            await _latency(url, port, stamps, args.runs, report)
        with _nodes(url, 0.0, cpus[-1]):
            await _frames(port)
            frames_file = folder / "frames"
            frames_file.write_bytes(frames)
            async with _bare(frames_file, cpus[0]) as bare:
                await _throughput(router, bare, request_bytes(), args.runs, report)
    for program in args.peers:
        async with _bare(frames_file, cpus[-1]) as worker, running(program, worker.port, cpus[0]) as peer:
            await _throughput(peer, None, REQUEST, args.runs, report)


async def _latency(url: str, port: int, stamps: Stamps, runs: int, report: Report) -> None:
    """What the router adds to the time of the first frame, and to each later token's from its node to the client."""
    connection, request = await Connection.open(port), request_bytes()
    added_first, added_token = [], []
    async with Direct(url) as direct:
        for _ in range(runs):
            ours = await _medians(lambda: connection.ask(request), stamps)
            theirs = await _medians(direct.ask, stamps)
            added_first.append((ours.first_s - theirs.first_s) * 1e3)
            added_token.append((ours.token_s - theirs.token_s) * 1e3)
    connection.close()
    report.add("router_first_byte_added", statistics.median(added_first), "ms", FIRST_LIMIT_MS, runs)
    report.add("router_per_token_added", statistics.median(added_token), "ms", TOKEN_LIMIT_MS, runs)


@dataclass(frozen=True, slots=True)
class _Medians:
    """Seconds from a question to its first token, and from a later token's sending by its node to its arrival."""

    first_s: float
    token_s: float


async def _medians(ask: Callable[[], Awaitable[Seen]], stamps: Stamps) -> _Medians:
    firsts, tokens = [], []
    for _ in range(LATENCY_REQUESTS):
        seen = await ask()
        sent_s = stamps.all()
        firsts.append(seen.first_s)
        tokens += [seen.frames_s[index] - sent_s[index] for index in range(1, NUM_TOKENS)]
    return _Medians(statistics.median(firsts), statistics.median(tokens))


async def _throughput(server: Server, limit: Server | None, request: bytes, runs: int, report: Report) -> None:
    """Answers and tokens a second, and answers a second of processor time; of the limit too, in turns."""
    rates, limits = list[Rate](), list[Rate]()
    for _ in range(runs):
        rates.append(await throughput(server, request, CONCURRENCY, THROUGHPUT_S))
        if limit is not None:
            limits.append(await throughput(limit, request, CONCURRENCY, THROUGHPUT_S))
    found, bounds = _rows(rates), _rows(limits) if limits else {}
    for name, value in found.items():
        report.add(f"{server.name}_{name}", value, "1/s", bounds.get(name), runs)


def _rows(rates: Sequence[Rate]) -> dict[str, float]:
    per_s = statistics.median(rate.per_s for rate in rates)
    per_cpu_s = statistics.median(rate.per_cpu_s for rate in rates)
    name = f"requests_c{CONCURRENCY}"
    return {name: per_s, f"tokens_c{CONCURRENCY}": per_s * NUM_TOKENS, f"{name}_per_cpu_s": per_cpu_s}


async def _frames(port: int) -> bytes:
    """One answer's frames, once the router sees the nodes."""
    async with asyncio.timeout(60):
        while True:
            connection = await Connection.open(port)
            try:
                return b"".join(frames_of((await connection.ask(request_bytes())).raw))
            except RuntimeError:
                await asyncio.sleep(0.2)
            finally:
                connection.close()


@asynccontextmanager
async def _router(url: str, model: str, cpu: int) -> AsyncIterator[Server]:
    command = [sys.executable, "-m", "router", "--model", str(resolve_model(model).directory), "--port", "0"]
    command += ["--node-id", "bench-router", "--max-waiting", "4096"]
    environment = {name: value for name, value in os.environ.items() if name != ENV_SECRET} | {ENV_REDIS_URL: url}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE)
    try:
        os.sched_setaffinity(process.pid, {cpu})
        if process.stderr is None:
            raise RuntimeError("the router has no log")
        async with asyncio.timeout(60):
            while b"listening on" not in (line := await process.stderr.readline()):
                if not line:
                    raise RuntimeError("the router ended while starting")
        drain = asyncio.create_task(process.stderr.read())
        yield Server("router", int(line.rsplit(b":", 1)[1]), process.pid)
        drain.cancel()
    finally:
        process.terminate()
        await process.wait()


@contextmanager
def _nodes(url: str, step_s: float, cpu: int, stamps: Path | None = None) -> Iterator[None]:
    environment = {name: value for name, value in os.environ.items() if name != ENV_SECRET}
    command = [sys.executable, "-m", "bench.router_nodes", url, str(step_s)]
    command += [] if stamps is None else [str(stamps)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    os.sched_setaffinity(process.pid, {cpu})
    try:
        yield
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def _bare(frames: Path, cpu: int) -> AsyncIterator[Server]:
    command = [sys.executable, "-m", "bench.router_bare", str(frames)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    os.sched_setaffinity(process.pid, {cpu})
    try:
        if process.stdout is None:
            raise RuntimeError("the bare app says no port")
        yield Server("bare", int(await process.stdout.readline()), process.pid)
    finally:
        process.kill()
        await process.wait()


def main() -> int:
    """Entry point; returns the exit status."""
    made = argparse.ArgumentParser(prog="baton bench router", description=DESCRIPTION)
    made.add_argument("--json", action="store_true", help="one JSON array of rows on standard output")
    made.add_argument("--runs", type=int, default=MIN_RUNS, metavar="N", help="timed runs of each row, at least 5")
    made.add_argument("--model", default="smollm2-135m", help="name or directory; only its tokenizer is used")
    made.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="PATH",
        help="a `vllm-router` or `sglang-router` to measure too; those on the PATH are",
    )
    args = made.parse_args()
    try:
        args.peers = programs(args.peer)
    except ValueError as error:
        made.error(str(error))
    args.runs = max(MIN_RUNS, args.runs)
    report = Report(as_json=args.json)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name, redis_server(Path(name)) as url:
        uvloop.run(bench(args, report, Path(name), url))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
