"""The one reader of environment variables, and the argument groups that every service shares.

A service's configuration is one frozen dataclass, built once at start from its command line; secrets come from
the environment only, so that they never show up in a process list.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

ENV_REDIS_URL = "BATON_REDIS_URL"
ENV_SECRET = "BATON_SECRET"  # noqa: S105 - the name of a variable, not a secret
ENV_CACHE = "BATON_CACHE"
ENV_LOG_LEVEL = "BATON_LOG_LEVEL"


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
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton"


def log_level() -> str:
    """``$BATON_LOG_LEVEL``, default INFO."""
    return os.environ.get(ENV_LOG_LEVEL, "INFO").upper()


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
    if urlsplit(redis_url).scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("--redis must be a redis://, rediss:// or unix:// URL")
    raw = os.environ.get(ENV_SECRET)
    secret = raw.encode() if raw else None
    if secret is not None and len(secret) < 16:
        raise ConfigError(f"${ENV_SECRET} must have at least 16 characters, e.g. from: openssl rand -hex 32")
    if not is_loopback(args.bind) and secret is None:
        raise ConfigError(
            f"--bind {args.bind} is reachable from other machines: set ${ENV_SECRET} (the same on every "
            "process, e.g. from: openssl rand -hex 32), or bind 127.0.0.1"
        )
    advertise = args.advertise_host
    if advertise == "auto":
        advertise = route_address(redis_url) if args.bind in ("0.0.0.0", "::") else args.bind
    return ClusterConfig(
        node_id=args.node_id or f"{role}-{secrets.token_hex(4)}",
        epoch=new_epoch(),
        redis_url=redis_url,
        bind_host=args.bind,
        advertise_host=advertise,
        secret=secret,
    )


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
