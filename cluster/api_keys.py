"""API keys: who may ask, how much, and with whose prefix cache.

Only SHA-256 of a key is kept. Keys are random (:func:`new_key`), so that a hash without salt gives nothing away.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.config import ConfigError

MAX_KEY_BYTES: Final = 512
MAX_KEYS: Final = 10_000
_MIN_KEY_BYTES: Final = 16
KEY_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = frozenset({"name", "sha256", "requests_per_minute", "max_concurrent", "cache_salt"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key's holder. ``None`` limits are no limits; holders with the same ``cache_salt`` share prefix caches."""

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    cache_salt: str = ""


class KeyRing:
    """The keys of a router. No keys at all means that everybody may ask."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        """Raises :class:`ConfigError` if two keys have one name or one value."""
        if len({key.name for key in keys}) < len(keys) or len({key.digest for key in keys}) < len(keys):
            raise ConfigError("two API keys have the same name or the same value")
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """The holder of that key. Takes the same time whichever it is, or none."""
        digest = digest_of(presented[:MAX_KEY_BYTES])
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if len(presented) <= MAX_KEY_BYTES else None


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return f"sk-baton-{secrets.token_urlsafe(32)}"


def plain_key(name: str, key: bytes) -> ApiKey:
    """The holder of a key that is given as it is. Raises :class:`ConfigError` for one that is easily guessed."""
    if not _MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(f"an API key has {_MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes; `baton keys new NAME` makes one")
    return ApiKey(name, digest_of(key))


def read_keys(path: Path) -> list[ApiKey]:
    """The keys in a TOML file of ``[[key]]`` tables. Raises :class:`ConfigError` saying which entry is wrong."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    entries = content.get("key")
    if set(content) != {"key"} or not isinstance(entries, list) or not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f"{path} must hold 1 to {MAX_KEYS} [[key]] tables and nothing else")
    return [_key(entry, f"[[key]] number {number} in {path}") for number, entry in enumerate(entries, 1)]


def _key(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a table")
    if unknown := sorted(set(entry) - _FIELDS):
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; there are {', '.join(sorted(_FIELDS))}")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not KEY_NAME.fullmatch(name):
        raise ConfigError(f"{where}: name takes up to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
        raise ConfigError(f"{where}: sha256 must be the 64 hexadecimal digits that `baton keys new` prints")
    salt = entry.get("cache_salt", name)
    if not isinstance(salt, str) or len(salt) > 256:
        raise ConfigError(f"{where}: cache_salt must be a text of up to 256 characters")
    return ApiKey(
        name,
        bytes.fromhex(digest),
        _limit(entry, "requests_per_minute", where),
        _limit(entry, "max_concurrent", where),
        salt,
    )


def _limit(entry: dict[str, Any], field: str, where: str) -> int | None:
    value = entry.get(field)
    if value is not None and (type(value) is not int or not 0 < value <= 10**9):
        raise ConfigError(f"{where}: {field} must be a whole number from 1 to a billion")
    return value
