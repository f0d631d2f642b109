"""Children of `baton up` must not outlive it, however it ends.

``python -m cluster.parent PROGRAM ARGUMENT...`` becomes a program that cannot ask for that itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from cluster.config import parent_pid

_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Ask the kernel for SIGTERM when the process named in ``$BATON_PARENT_PID`` is gone. Linux only; else nothing."""
    parent = parent_pid()
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Become the program named on the command line; the kernel keeps the wish across ``exec``."""
    exit_with_parent()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the program is chosen by our own `baton up`


if __name__ == "__main__":
    main()
