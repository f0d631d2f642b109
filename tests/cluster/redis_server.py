"""The embedded server as `baton up` starts it, under a test's control, and a way to wait for things."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import redis

from cli import embedded_redis

LIMIT_S = 20.0


class RedisServer:
    """One server process on one port. :meth:`start` after :meth:`stop` brings it back empty."""

    def __init__(self, directory: Path) -> None:
        self._prepared = embedded_redis.prepare(directory)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self._prepared.url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(
            self._prepared.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._prepared.configuration)
        self._process.stdin.close()
        deadline = time.monotonic() + LIMIT_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None, "the server ended while starting"
                    assert time.monotonic() < deadline, "the server does not answer"
                    time.sleep(0.01)

    def stop(self) -> None:
        """Ends it at once; what it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


async def eventually(probe: Callable[[], Awaitable[object]] | Callable[[], object]) -> None:
    """Poll until ``probe`` is true."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = probe()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


def wait_until(probe: Callable[[], object]) -> None:
    """:func:`eventually` for tests without an event loop."""
    asyncio.run(eventually(probe))
