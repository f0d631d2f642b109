"""Several router processes on one port: each a router of its own, with its own identity in the cluster.

The kernel deals connections out among the sockets that listen on the port (SO_REUSEPORT). Nothing is shared, so a
worker that dies takes its own requests with it and no others; it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import sys
from collections.abc import Sequence
from typing import Final

from cluster.config import ConfigError, child_environment, url_host
from router.service import bind

log = logging.getLogger(__name__)

RESTART_S: Final = 1.0
STOP_S: Final = 15.0
_SETTINGS_STATUS: Final = 2


async def run_workers(arguments: Sequence[str], count: int, host: str, port: int, admin_port: int | None) -> int:
    """Run ``count`` routers with these command line ``arguments`` until SIGTERM or SIGINT; returns the exit status.

    What each worker has for itself (port, admin port, node id) is appended: the last of two options counts.
    Raises :class:`ConfigError` if the port is taken, or if a worker ends because its settings cannot work.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    base = f"router-{secrets.token_hex(4)}"
    # Bound and never listening: it holds the port for the workers, and port 0 becomes one port for all.
    with bind(host, port, reuse_port=True) as held:
        common = [*arguments, "--port", str(held.getsockname()[1]), "--workers", "1", "--share-of-limits", str(count)]
        log.info("%d workers on http://%s:%d", count, url_host(host), held.getsockname()[1])
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(count):
                    own = ["--node-id", f"{base}-{index}"]
                    own += [] if admin_port is None else ["--admin-port", str(admin_port and admin_port + index)]
                    tasks.create_task(_keep_running([*common, *own], f"{base}-{index}", stop))
        except BaseExceptionGroup as group:
            if (unusable := group.subgroup(ConfigError)) is None:
                raise
            raise ConfigError(str(unusable.exceptions[0])) from None
    return 0


async def _keep_running(arguments: list[str], name: str, stop: asyncio.Event) -> None:
    while not stop.is_set():
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *arguments, env=child_environment({})
        )
        try:
            status = await _until_ended(worker, stop)
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
        if status == _SETTINGS_STATUS:
            raise ConfigError(f"worker {name} cannot run with these settings; its own message is above")
        if not stop.is_set():
            log.error("worker %s ended with status %d; starting it again", name, status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), RESTART_S)


async def _until_ended(worker: asyncio.subprocess.Process, stop: asyncio.Event) -> int:
    """The worker's exit status; it is told to stop when we are."""
    ended = asyncio.create_task(worker.wait())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            worker.terminate()
            await asyncio.wait((ended,), timeout=STOP_S)
            if not ended.done():
                log.error("a worker did not stop within %g s; killing it", STOP_S)
                worker.kill()
        return await ended
    finally:
        stopping.cancel()
        ended.cancel()
