"""Running commands: every call has a deadline, and a failed one shows what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
_SHOWN_CHARS: Final = 6000


class StepError(Exception):
    """A step could not be done; the message says which command, and what it printed last."""


def say(text: str) -> None:
    """One line of progress, at once even into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def timed(title: str) -> Iterator[None]:
    """Print ``title`` and how long its block took."""
    started = time.monotonic()
    say(f"   {title} ...")
    yield
    say(f"   {title}: {time.monotonic() - started:.1f} s")


def run(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run in the repository to the end; ``env`` is added to our own environment.

    Raises :class:`StepError` when the deadline passes and, with ``check``, when the command fails.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own commands
            command,
            cwd=REPOSITORY,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise StepError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise StepError(f"{_shown(command)}: not done after {timeout_s:.0f} s") from error
    if check and done.returncode:
        raise StepError(f"{_shown(command)}: exit {done.returncode}\n{printed(done)}")
    return done


def succeeds(command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> bool:
    """True if the command exists, ends in time and exits 0."""
    try:
        return run(command, timeout_s=timeout_s, env=env, check=False).returncode == 0
    except StepError:
        return False


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a command printed, on either stream."""
    return (done.stdout + done.stderr).strip()[-_SHOWN_CHARS:]


def _shown(command: Sequence[str]) -> str:
    line = " ".join(command)
    return line if len(line) < 200 else line[:200] + "..."
