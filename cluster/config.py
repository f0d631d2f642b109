"""The one reader of environment variables, and the argument groups that every service shares.

A service's configuration is one frozen dataclass, built once at start from its command line; secrets come from
the environment only, so that they never show up in a process list.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

ENV_REDIS_URL = "BATON_REDIS_URL"
ENV_SECRET = "BATON_SECRET"  # noqa: S105 - the name of a variable, not a secret
ENV_API_KEY = "BATON_API_KEY"
ENV_CACHE = "BATON_CACHE"
ENV_CXX = "CXX"
ENV_LOG_LEVEL = "BATON_LOG_LEVEL"
ENV_REQUIRE_TRANSPORT = "BATON_REQUIRE_TRANSPORT"
ENV_PARENT_PID = "BATON_PARENT_PID"
MIN_SECRET_BYTES = 16

_NODE_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}")


class ConfigError(Exception):
    """A setting that cannot work; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How a process meets the others: where it binds, what it tells them, and the shared secret."""

    node_id: str
    epoch: int
    redis_url: str
    bind_host: str
    advertise_host: str
    secret: bytes | None


def new_epoch() -> int:
    """A random 63-bit name for this life of a process."""
    return secrets.randbits(63)


def cache_dir() -> Path:
    """The user's cache for Baton: ``$BATON_CACHE``, else ``$XDG_CACHE_HOME/baton``, else ``~/.cache/baton``."""
    if own := os.environ.get(ENV_CACHE):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton"


def compilers() -> tuple[str, ...]:
    """C++ compilers to try in turn: ``$CXX`` if set, then the usual names."""
    own = os.environ.get(ENV_CXX)
    return (*((own,) if own else ()), "g++", "clang++", "c++")


def log_level() -> str:
    """``$BATON_LOG_LEVEL``, default INFO. Raises :class:`ConfigError` for a level that logging does not know."""
    level = os.environ.get(ENV_LOG_LEVEL, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"${ENV_LOG_LEVEL} must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
    return level


def shared_secret() -> bytes | None:
    """``$BATON_SECRET``, or None if it is not set. Raises :class:`ConfigError` if it is too short to protect."""
    raw = os.environ.get(ENV_SECRET)
    secret = os.fsencode(raw) if raw else None
    if secret is not None and len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"${ENV_SECRET} must have at least {MIN_SECRET_BYTES} characters, e.g. from: openssl rand -hex 32"
        )
    return secret


def api_key() -> bytes | None:
    """``$BATON_API_KEY``, or None if it is not set."""
    raw = os.environ.get(ENV_API_KEY)
    return os.fsencode(raw) if raw else None


def required_transport() -> str | None:
    """``$BATON_REQUIRE_TRANSPORT``: the default of ``--require-transport``, not checked here."""
    return os.environ.get(ENV_REQUIRE_TRANSPORT) or None


def parent_pid() -> int | None:
    """``$BATON_PARENT_PID``: the `baton up` that started this process, or None."""
    raw = os.environ.get(ENV_PARENT_PID, "")
    return int(raw) if raw.isascii() and raw.isdigit() else None


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that this one starts and that ends with it: ours, and ``own``."""
    return {**os.environ, **own, ENV_PARENT_PID: str(os.getpid())}


def set_default_environment(defaults: dict[str, str]) -> None:
    """Set variables a vendor library reads at import, unless the operator has set them."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def add_cluster_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    """Options that say how this process meets the others."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--redis",
        metavar="URL",
        help=f"Redis that lists the nodes, e.g. redis://:PASSWORD@127.0.0.1:6379/0 (default: ${ENV_REDIS_URL})",
    )
    group.add_argument("--node-id", help=f"name in the cluster (default: {role}-<random>)")
    group.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="HOST",
        help=f"interface for control and KV traffic; anything but loopback needs ${ENV_SECRET} (default: %(default)s)",
    )
    group.add_argument(
        "--advertise-host",
        default="auto",
        metavar="HOST",
        help="address the others reach this process at; 'auto' is the bound one, or for 0.0.0.0 "
        "the one that routes to Redis (default: auto)",
    )


def cluster_config(args: argparse.Namespace, role: str) -> ClusterConfig:
    """Check and freeze the options of :func:`add_cluster_arguments`. Raises :class:`ConfigError`."""
    redis_url = args.redis or os.environ.get(ENV_REDIS_URL)
    if not redis_url:
        raise ConfigError(f"no Redis given: pass --redis URL or set ${ENV_REDIS_URL}")
    check_redis_url(redis_url)
    node_id = args.node_id or f"{role}-{secrets.token_hex(4)}"
    if not _NODE_ID.fullmatch(node_id):
        raise ConfigError("--node-id takes up to 128 letters, digits, dots, dashes and underscores")
    secret = shared_secret()
    bind = "127.0.0.1" if args.bind == "localhost" else args.bind  # ZeroMQ binds numbers and interfaces only
    advertise = args.advertise_host
    if advertise == "auto":
        advertise = route_address(redis_url) if bind in ("0.0.0.0", "::") else bind
    if not _HOST.fullmatch(advertise):
        raise ConfigError("--advertise-host takes a host name or an IP address, without a port")
    for option, host in (("--bind", bind), ("--advertise-host", advertise)):
        if secret is None and not is_loopback(host):
            raise ConfigError(
                f"{option} {host} is reachable from other machines: set ${ENV_SECRET} (the same on every "
                "process, e.g. from: openssl rand -hex 32), or use 127.0.0.1"
            )
    return ClusterConfig(
        node_id=node_id,
        epoch=new_epoch(),
        redis_url=redis_url,
        bind_host=bind,
        advertise_host=advertise,
        secret=secret,
    )


def check_redis_url(redis_url: str) -> None:
    """Raises :class:`ConfigError` for what is no Redis URL; never repeats it, it may hold a password."""
    try:
        parts = urlsplit(redis_url)
        port_is_usable = parts.port is None or parts.port > 0
    except ValueError:
        raise ConfigError("--redis is not a URL: check its host and port") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("--redis must be a redis://, rediss:// or unix:// URL")
    if not port_is_usable:
        raise ConfigError("--redis is not a URL: check its host and port")


def url_host(host: str) -> str:
    """``host`` as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def route_address(redis_url: str) -> str:
    """The local address from which packets to Redis leave; raises :class:`ConfigError` if there is no route."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix" or not parts.hostname:
        return "127.0.0.1"
    try:
        family, kind, proto, _name, address = socket.getaddrinfo(
            parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"cannot find the address that routes to Redis ({error}); pass --advertise-host") from error
