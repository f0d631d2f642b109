"""Which node holds which prefix: a set of block names in Redis for each life of a node, and a log of its changes.

The node writes ``baton:kv:{id}:{epoch}`` (a set of 16-byte names) and ``baton:kvlog:{id}:{epoch}`` (a stream of
changes, each with a sequence number, trimmed). The router loads the set once, then follows the log; a gap in the
numbers makes it load the set again. It is a hint for placement only: a wrong entry costs time, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from cluster.membership import connect
from cluster.prefix_hash import HASH_BYTES
from cluster.wire import Party

log = logging.getLogger(__name__)

PUBLISH_S: Final = 0.2
FOLLOW_S: Final = 0.2
EXPIRY_S: Final = 30
LOG_ENTRIES: Final = 2_000
MAX_NAMES: Final = 1_000_000
READ_TIMEOUT_S: Final = 3.0
NAMES_PER_COMMAND: Final = 10_000


class DirectoryError(Exception):
    """What Redis holds for one node is not what a node of ours would write."""


class DirectoryAwayError(DirectoryError):
    """Redis could not be reached: no node's names can be read now."""


class PrefixPublisher:
    """Tells Redis what one node's prefix cache holds. Owns its connections.

    ``read_changes`` returns the names (added, removed) since its last call.
    """

    def __init__(
        self, redis_url: str, party: Party, read_changes: Callable[[], tuple[list[bytes], list[bytes]]]
    ) -> None:
        self._redis = connect(redis_url)
        self._party = party
        self._read_changes = read_changes
        self._names: set[bytes] = set()
        self._sequence = 0
        self._in_step = False

    async def run(self) -> None:
        """Publish changes until cancelled. After a failure, or if Redis lost it, the whole set is written again."""
        idle_s = 0.0
        while True:
            added, removed = self._read_changes()
            self._names.difference_update(removed)
            self._names.update(added)
            idle_s = 0.0 if added or removed else idle_s + PUBLISH_S
            try:
                if not self._in_step:
                    await self._write_all()
                elif added or removed:
                    await self._write_changes(added, removed)
                elif idle_s > EXPIRY_S / 4:
                    idle_s = 0.0
                    await self._keep_alive()
            except (RedisError, OSError) as error:
                self._in_step = False
                log.warning("prefix directory not updated: %s", type(error).__name__)
                await asyncio.sleep(random.uniform(0.5, 2.0))
            await asyncio.sleep(PUBLISH_S)

    async def remove(self) -> None:
        """Take this node's names away (a clean stop). Redis being away is no error: the keys expire."""
        try:
            await self._redis.delete(_set_key(self._party), _log_key(self._party))
        except (RedisError, OSError) as error:
            log.warning("prefix directory not removed: %s", type(error).__name__)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _write_all(self) -> None:
        self._sequence += 1
        async with self._redis.pipeline(transaction=True) as pipe:
            # The log too: whatever lies under its key, this life's log starts anew here.
            pipe.delete(_set_key(self._party), _log_key(self._party))
            names = list(self._names)
            for start in range(0, len(names), NAMES_PER_COMMAND):
                pipe.sadd(_set_key(self._party), *names[start : start + NAMES_PER_COMMAND])
            pipe.xadd(_log_key(self._party), {"n": self._sequence, "all": b""}, maxlen=LOG_ENTRIES)
            self._expire(pipe)
            await pipe.execute()
        self._in_step = True

    async def _write_changes(self, added: list[bytes], removed: list[bytes]) -> None:
        self._sequence += 1
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.exists(_log_key(self._party))
            if removed:
                pipe.srem(_set_key(self._party), *removed)
            if added:
                pipe.sadd(_set_key(self._party), *added)
            entry: Any = {"n": self._sequence, "add": b"".join(added), "remove": b"".join(removed)}
            pipe.xadd(_log_key(self._party), entry, maxlen=LOG_ENTRIES)
            self._expire(pipe)
            log_existed, *_others = await pipe.execute()
        self._in_step = bool(log_existed)  # a Redis that came back empty has these changes only

    async def _keep_alive(self) -> None:
        if not await self._redis.expire(_log_key(self._party), EXPIRY_S):
            self._in_step = False
        await self._redis.expire(_set_key(self._party), EXPIRY_S)

    def _expire(self, pipe: redis.client.Pipeline) -> None:
        pipe.expire(_set_key(self._party), EXPIRY_S)
        pipe.expire(_log_key(self._party), EXPIRY_S)


class PrefixReader:
    """Reads one node's names: all of them once, then its changes. Owns nothing; borrows the connection."""

    def __init__(self, connection: redis.Redis, party: Party) -> None:
        self._redis = connection
        self._party = party
        self._last_id: bytes | None = None
        self._last_sequence = -1
        self.names: set[bytes] = set()

    async def update(self) -> None:
        """Bring ``names`` up to date. Raises :class:`DirectoryError`; call again later."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                if self._last_id is None:
                    await self._load()
                else:
                    await self._follow()
        except (ResponseError, ValueError, KeyError, TypeError) as error:
            self._last_id = None
            self.names = set()
            raise DirectoryError("its prefix log or set does not match the schema") from error
        except (RedisError, OSError) as error:
            raise DirectoryAwayError(f"cannot read the prefix directory: {type(error).__name__}") from error

    async def _load(self) -> None:
        newest: Any = await self._redis.xrevrange(_log_key(self._party), count=1)
        if not newest:
            return
        if await self._redis.scard(_set_key(self._party)) > MAX_NAMES:
            raise ValueError("too many names")
        names: Any = await self._redis.smembers(_set_key(self._party))
        if any(len(name) != HASH_BYTES for name in names):
            raise ValueError("names are 16 bytes long")
        self.names = set(names)
        entry_id, fields = newest[0]
        self._last_id, self._last_sequence = entry_id, int(fields[b"n"])

    async def _follow(self) -> None:
        position: Any = {_log_key(self._party): self._last_id}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xread(position, count=LOG_ENTRIES)
            pipe.xrevrange(_log_key(self._party), count=1)
            answer, newest = await pipe.execute()
        if not answer and (not newest or newest[0][0] != self._last_id):
            self._last_id = None  # the log was lost, and perhaps begun again by a slower clock
        for _stream, entries in answer or []:
            for entry_id, fields in entries:
                sequence = int(fields[b"n"])
                if b"all" in fields or sequence != self._last_sequence + 1:
                    self._last_id = None
                    return
                self.names.difference_update(_split(fields[b"remove"]))
                self.names.update(_split(fields[b"add"]))
                self._last_id, self._last_sequence = entry_id, sequence
                if len(self.names) > MAX_NAMES:
                    raise ValueError("too many names")


class PrefixFollower:
    """The router's connection to the directory."""

    def __init__(self, redis_url: str) -> None:
        self._redis = connect(redis_url)

    def reader(self, party: Party) -> PrefixReader:
        """A reader of one life of one node."""
        return PrefixReader(self._redis, party)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def _split(joined: bytes) -> Iterable[bytes]:
    if len(joined) % HASH_BYTES:
        raise ValueError("names are 16 bytes long")
    return (joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES))


def _set_key(party: Party) -> str:
    return f"baton:kv:{party.id}:{party.epoch}"


def _log_key(party: Party) -> str:
    return f"baton:kvlog:{party.id}:{party.epoch}"
