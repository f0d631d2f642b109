"""Starts a real decode node against a private Redis and sees how long it takes and how much memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cli import embedded_redis
from cluster.config import ENV_REDIS_URL
from cluster.membership import Membership, MembershipError

ROOT = Path(__file__).parent.parent
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds to the node's record in Redis; its peak resident memory until then, KV pool included."""

    seconds: float
    peak_bytes: int


def start_node(directory: Path, threads: int) -> Start:
    """Start one node with a small KV pool, wait until it is in Redis, end it."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, redis_server(Path(folder)) as url:
        command = [sys.executable, "-m", "decode_node", "--model", str(directory), "--node-id", "bench"]
        command += ["--threads", str(threads), "--kv-memory-gb", "0.1", "--transport", "tcp"]
        began = time.monotonic()
        with (Path(folder) / "node.log").open("wb") as log:
            environment = {**os.environ, ENV_REDIS_URL: url}
            node = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            asyncio.run(_until_registered(url, node))
            seconds = time.monotonic() - began
            status = Path(f"/proc/{node.pid}/status").read_text()
            peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            return Start(seconds, int(peak.split()[1]) * 1024)
        finally:
            node.terminate()
            node.wait(30)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    server = embedded_redis.prepare(folder)
    process = subprocess.Popen(server.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT)
    try:
        if process.stdin is not None:
            process.stdin.write(server.configuration)
            process.stdin.close()
        asyncio.run(_until_answering(server.url))
        yield server.url
    finally:
        process.terminate()
        process.wait(30)


async def _until_answering(url: str) -> None:
    membership = Membership(url)
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await membership.read()
                except MembershipError:
                    await asyncio.sleep(0.05)
                else:
                    return
    finally:
        await membership.close()


async def _until_registered(url: str, node: subprocess.Popen[bytes]) -> None:
    membership = Membership(url)
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await membership.read():
                if node.poll() is not None:
                    raise RuntimeError(f"the node ended with status {node.returncode}")
                await asyncio.sleep(0.02)
    finally:
        await membership.close()
