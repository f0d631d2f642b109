"""UCXX and NIXL each bring a UCX of their own, and a process that loads both does not survive it: one of them only."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final, Literal

from kvtransfer.errors import TransportUnavailableError

Vendor = Literal["ucx", "nixl"]
_PACKAGES: Final[dict[Vendor, str]] = {"ucx": "ucxx", "nixl": "nixl_cu12"}
# Both read UCX's settings from the environment. Measured in our trials; see docs/adr. The operator's own values win.
# They have to be there before a vendor is imported (ucxx sets some itself) and before the first context.
_UCX_DEFAULTS: Final = {
    # A block goes in few parts: 0.79 of a bare socket's rate, 0.70 with 256K (64 blocks of 512 KiB). A receiver must
    # take the parts that its sender makes, so other sizes are another version of the wire.
    "UCX_TCP_TX_SEG_SIZE": "1M",
    "UCX_TCP_RX_SEG_SIZE": "1M",
    # A connect to an address that vanished without a reset would otherwise block this thread for a minute.
    "UCX_TCP_CONN_NB": "y",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_POSIX_ERROR_HANDLING": "y",
    "UCX_SYSV_ERROR_HANDLING": "y",
    "UCX_CMA_MEMORY_INVALIDATE": "y",
    "UCX_RNDV_THRESH": "intra:auto,inter:auto",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}

_lock = threading.Lock()
_chosen: Vendor | None = None


def choose(vendor: Vendor) -> None:
    """From now on this process uses that one; call before importing it. Sets UCX's settings.

    Raises `TransportUnavailableError` if the other one was chosen before, or somebody has imported it.
    """
    global _chosen
    other: Vendor = "nixl" if vendor == "ucx" else "ucx"
    with _lock:
        if _chosen == other or _PACKAGES[other] in sys.modules:
            raise TransportUnavailableError(
                f"this process uses {_PACKAGES[other]} already, and {_PACKAGES[vendor]} must not be loaded beside it:"
                " offer the scheme ucx or nixl, not both"
            )
        _chosen = vendor
        for name, value in _UCX_DEFAULTS.items():
            os.environ.setdefault(name, value)


def setting(name: str) -> str | None:
    """An environment variable of UCX or NIXL as it is now."""
    return os.environ.get(name)


def set_default(name: str, value: str) -> str:
    """Set a variable unless the operator has; returns what is in force."""
    return os.environ.setdefault(name, value)


def make_home_readable() -> None:
    """NIXL reads ``$HOME/.nixl.cfg`` and fails where it may not look."""
    if not os.access(os.environ.get("HOME", ""), os.R_OK | os.X_OK):
        os.environ["HOME"] = "/"  # readable by all, and written by nobody who could plant a file there


def leave(status: int) -> int:
    """Returns the status to exit with. With NIXL loaded it ends the process instead.

    An ordinary exit would crash in the destructors that NIXL registers.
    """
    if _chosen == "nixl":
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    return status
