"""Processes that `baton up` starts, watches and ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.parent import ENV_PARENT_PID

STOP_GRACE_S = 10.0
TAIL_BYTES = 4000


@dataclass(slots=True)
class Child:
    """A started process and its log file."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        return self.process.returncode is None

    def tail(self) -> str:
        """The end of its log."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace")


class Children:
    """Owns the processes: whatever happens, :meth:`stop` leaves none."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children)

    async def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], stdin: bytes | None = None
    ) -> Child:
        """Start a process with its output in ``<name>.log``. Ctrl-C in the terminal does not reach it directly."""
        path = self._log_dir / f"{name}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **env, ENV_PARENT_PID: str(os.getpid())},
                start_new_session=True,
            )
        child = Child(name, process, path)
        self._children.append(child)
        if stdin is not None and process.stdin is not None:
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()
        return child

    async def first_exit(self, known: set[str]) -> Child:
        """Wait until a child that is not in ``known`` has ended."""
        while True:
            for child in self._children:
                if not child.alive and child.name not in known:
                    return child
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """End all, the last started first: SIGTERM, and after a grace SIGKILL."""
        for child in reversed(self._children):
            await _stop(child)


async def _stop(child: Child) -> None:
    if not child.alive:
        return
    child.process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await child.process.wait()
    except TimeoutError:
        child.process.kill()
        await child.process.wait()
