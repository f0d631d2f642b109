"""Processes that `baton up` starts, watches and ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ConfigError, child_environment

STOP_GRACE_S = 10.0
TAIL_BYTES = 4000


@dataclass(slots=True)
class Child:
    """A started process and its log file. Children of a later ``stage`` need those of earlier ones."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    stage: int

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
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], stage: int = 0, stdin: bytes | None = None
    ) -> Child:
        """Start a process with its output in ``<name>.log``. Ctrl-C in the terminal does not reach it directly.

        Raises :class:`ConfigError` if there is no such program.
        """
        path = self._log_dir / f"{name}.log"
        try:
            with path.open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env=child_environment(env),
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot start {name}: {error.strerror}") from error
        child = Child(name, process, path, stage)
        self._children.append(child)
        if stdin is not None and process.stdin is not None:
            with suppress(ConnectionError):  # it ended at once; whoever watches it says why
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
        """End all, later stages first, those of one stage together: SIGTERM, and after a grace SIGKILL."""
        for stage in sorted({child.stage for child in self._children}, reverse=True):
            await asyncio.gather(*(_stop(child) for child in self._children if child.stage == stage))


async def _stop(child: Child) -> None:
    if not child.alive:
        return
    with suppress(ProcessLookupError):  # it has just ended
        child.process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await child.process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()
