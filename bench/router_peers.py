"""Routers in Rust for the rows beside ours in `baton bench router`: whichever of them are on the PATH or named."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.router_client import Connection, Server, request_bytes

START_S = 60.0
# They take no token ids, and want a name.
REQUEST = request_bytes(" and" * 32, model="bench")
# What comes before the options that both take.
_SUBCOMMANDS = {"vllm-router": (), "sglang-router": ("launch",)}


def programs(named: Sequence[str]) -> list[Path]:
    """Those named, and those on the PATH whose names are not among them. Raises ValueError for one we do not know."""
    found = {Path(path).name: Path(path) for path in named}
    if unknown := found.keys() - _SUBCOMMANDS.keys():
        raise ValueError(f"--peer takes {' or '.join(_SUBCOMMANDS)}, not {', '.join(sorted(unknown))}")
    for name in _SUBCOMMANDS:
        if name not in found and (path := shutil.which(name)) is not None:
            found[name] = Path(path)
    return [found[name] for name in sorted(found)]


@asynccontextmanager
async def running(program: Path, worker_port: int, cpu: int) -> AsyncIterator[Server]:
    """That router in front of an OpenAI-compatible worker, on a CPU of its own, once it answers."""
    port, metrics_port = _free_port(), _free_port()
    command = [str(program), *_SUBCOMMANDS[program.name], "--worker-urls", f"http://127.0.0.1:{worker_port}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--policy", "round_robin", "--log-level", "error"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        os.sched_setaffinity(process.pid, {cpu})
        async with asyncio.timeout(START_S):
            while not await _answers(port):
                if process.returncode is not None:
                    raise RuntimeError(f"{program.name} ended with status {process.returncode}")
                await asyncio.sleep(0.2)
        yield Server(program.name, port, process.pid)
    finally:
        process.terminate()
        await process.wait()


async def _answers(port: int) -> bool:
    try:
        connection = await Connection.open(port)
    except OSError:
        return False
    try:
        await connection.ask(REQUEST)
    except RuntimeError:
        return False
    finally:
        connection.close()
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
