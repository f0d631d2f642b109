"""Children of `baton up` must not outlive it, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ENV_PARENT_PID = "BATON_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Ask the kernel for SIGTERM when the process named in ``$BATON_PARENT_PID`` is gone. Linux only; else nothing."""
    parent = os.environ.get(ENV_PARENT_PID)
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)
