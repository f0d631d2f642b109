"""``compose/test-compose``: engine, images, services, checks; ends with a line ``N passed, N failed``."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from testing.base_image import base_images, fetch
from testing.checks import CHECKS, serves_with_two_nodes_of_each_kind
from testing.engine import engine, install_engine
from testing.shell import StepError, say
from testing.stack import Stack, stack


def main() -> int:
    """Exit status: 0 if every check passed."""
    made = argparse.ArgumentParser(prog="compose/test-compose", description=__doc__)
    made.add_argument(
        "--fetch",
        action="store_true",
        help="only get what a later run needs where no engine runs: Docker, a Debian, the wheels; starts nothing",
    )
    only_fetch = made.parse_args().fetch
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, _leave)
    started = time.monotonic()
    cache = _cache()
    passed, failed = 0, len(CHECKS)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once would share names and folders
        try:
            if only_fetch:
                _fetch(cache)
                return 0
            with ExitStack() as resources:
                running = resources.enter_context(engine(cache))
                services = resources.enter_context(stack(running, base_images(running, cache)))
                passed, failed = _check_all(services)
        except StepError as error:
            say(f"FAIL {error}")
            failed = max(failed, 1)
    say(f"total: {time.monotonic() - started:.1f} s")
    say(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def _fetch(cache: Path) -> None:
    if install_engine():
        fetch(cache)
    else:
        say("   a Docker engine is running: what it has is known when it is used")


def _check_all(services: Stack) -> tuple[int, int]:
    passed = 0
    for number, check in enumerate(CHECKS):
        title = check.__name__.replace("_", " ")
        started = time.monotonic()
        try:
            check(services)
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails this check and the others still run
            say(f"FAIL {title}: {type(error).__name__}: {error}")
            services.print_logs()
            if check is serves_with_two_nodes_of_each_kind:
                return passed, len(CHECKS) - passed  # nothing runs: the rest would only repeat it
        else:
            passed += 1
            say(f"ok   {number + 1:2} {title} ({time.monotonic() - started:.1f} s)")
    return passed, len(CHECKS) - passed


def _cache() -> Path:
    base = os.environ.get("BATON_CACHE")
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) if base else Path(xdg) / "baton"
    (folder / "compose-test").mkdir(parents=True, exist_ok=True)
    return folder / "compose-test"


def _leave(sign: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + sign)  # unwinds, so that everything is taken down


if __name__ == "__main__":
    sys.exit(main())
