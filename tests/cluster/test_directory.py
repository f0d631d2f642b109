"""The prefix directory in a real server: readers end where the publisher is, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from cluster import directory
from cluster.directory import DirectoryAwayError, DirectoryError, PrefixFollower, PrefixPublisher, PrefixReader
from cluster.prefix_hash import block_hashes, seed_hash
from cluster.wire import Party
from tests.cluster.redis_server import RedisServer, eventually

PARTY = Party("decode-0", 7, "tcp://127.0.0.1:4000")
SET_KEY, LOG_KEY = "baton:kv:decode-0:7", "baton:kvlog:decode-0:7"
NAMES = block_hashes(seed_hash("layout"), range(400), 4)


class Cache:
    """A node's prefix cache, as the publisher sees it."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self._added: list[bytes] = []
        self._removed: list[bytes] = []

    def add(self, *names: bytes) -> None:
        self.held.update(names)
        self._added.extend(names)

    def remove(self, *names: bytes) -> None:
        self.held.difference_update(names)
        self._removed.extend(names)

    def read_changes(self) -> tuple[list[bytes], list[bytes]]:
        changes = self._added, self._removed
        self._added, self._removed = [], []
        return changes


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PUBLISH_S", 0.01)


@pytest.fixture
async def follower(redis_url: str) -> AsyncIterator[PrefixFollower]:
    opened = PrefixFollower(redis_url)
    yield opened
    await opened.close()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@contextlib.asynccontextmanager
async def publishing(url: str, cache: Cache) -> AsyncIterator[PrefixPublisher]:
    publisher = PrefixPublisher(url, PARTY, cache.read_changes)
    running = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await publisher.close()


async def in_step(reader: PrefixReader, cache: Cache) -> bool:
    try:
        await reader.update()
    except DirectoryError:
        return False
    return reader.names == cache.held


async def test_a_reader_loads_all_and_follows(redis_url: str, follower: PrefixFollower, cache: Cache) -> None:
    cache.add(*NAMES[:10])
    async with publishing(redis_url, cache):
        early = follower.reader(PARTY)
        await eventually(lambda: in_step(early, cache))
        for start in range(10, 100, 10):
            cache.add(*NAMES[start : start + 10])
            cache.remove(*NAMES[start - 10 : start - 5])
            await eventually(lambda: in_step(early, cache))
        late = follower.reader(PARTY)
        await eventually(lambda: in_step(late, cache))
        assert len(late.names) == 55


async def test_another_life_has_other_keys(redis_url: str, follower: PrefixFollower, cache: Cache) -> None:
    cache.add(*NAMES[:3])
    other = follower.reader(Party(PARTY.id, PARTY.epoch + 1, PARTY.address))
    async with publishing(redis_url, cache):
        reader = follower.reader(PARTY)
        await eventually(lambda: in_step(reader, cache))
        await other.update()
        assert other.names == set()


async def test_a_clean_stop_takes_the_names_away(redis_url: str, raw: redis.asyncio.Redis, cache: Cache) -> None:
    cache.add(*NAMES[:3])
    async with publishing(redis_url, cache) as publisher:
        await eventually(lambda: raw.scard(SET_KEY))
        assert 0 < await raw.ttl(SET_KEY) <= directory.EXPIRY_S
        assert 0 < await raw.ttl(LOG_KEY) <= directory.EXPIRY_S
    removing = PrefixPublisher(redis_url, PARTY, cache.read_changes)
    await removing.remove()
    await removing.close()
    assert not await raw.exists(SET_KEY, LOG_KEY)
    del publisher


async def test_a_reader_that_lost_entries_loads_again(
    redis_url: str, follower: PrefixFollower, raw: redis.asyncio.Redis, cache: Cache
) -> None:
    cache.add(*NAMES[:5])
    async with publishing(redis_url, cache):
        reader = follower.reader(PARTY)
        await eventually(lambda: in_step(reader, cache))
        for start in range(5, 20):
            cache.add(NAMES[start])
            await eventually(lambda s=start: raw.sismember(SET_KEY, NAMES[s]))  # type: ignore[misc]
        await raw.xtrim(LOG_KEY, maxlen=1, approximate=False)
        await eventually(lambda: in_step(reader, cache))


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_an_emptied_redis_is_filled_again(
    redis_url: str,
    follower: PrefixFollower,
    raw: redis.asyncio.Redis,
    cache: Cache,
    busy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emptied without a broken connection: the next change alone would be an incomplete set."""
    monkeypatch.setattr(directory, "EXPIRY_S", 1)
    cache.add(*NAMES[:20])
    async with publishing(redis_url, cache):
        reader = follower.reader(PARTY)
        await eventually(lambda: in_step(reader, cache))
        await raw.flushall()
        if busy:
            cache.add(NAMES[20])
        await eventually(lambda: _holds(raw, cache))
        fresh = follower.reader(PARTY)
        await eventually(lambda: in_step(fresh, cache))
        await eventually(lambda: in_step(reader, cache))


async def test_a_restarted_redis_is_filled_again(own_server: RedisServer, cache: Cache) -> None:
    cache.add(*NAMES[:20])
    follower = PrefixFollower(own_server.url)
    reader = follower.reader(PARTY)
    async with publishing(own_server.url, cache):
        with pytest.raises(DirectoryAwayError):
            await reader.update()
        for round_number in range(2):
            own_server.start()
            await eventually(lambda: in_step(reader, cache))
            own_server.stop()
            cache.add(NAMES[30 + round_number])
            cache.remove(NAMES[round_number])
            with pytest.raises(DirectoryAwayError):
                await reader.update()
            assert len(reader.names) == 20, "what was known stays known"
    await follower.close()


async def test_a_log_that_begins_again_in_the_past_is_noticed(
    follower: PrefixFollower, raw: redis.asyncio.Redis, cache: Cache
) -> None:
    """A server restarted on a machine with a slower clock: its new entries come before the last one read."""
    await raw.sadd(SET_KEY, NAMES[0])
    await raw.xadd(LOG_KEY, {"n": 5, "all": b""}, id="9999999999999-0")
    reader = follower.reader(PARTY)
    await reader.update()
    assert reader.names == {NAMES[0]}
    await raw.flushall()
    await raw.sadd(SET_KEY, NAMES[1])
    await raw.xadd(LOG_KEY, {"n": 1, "all": b""}, id="1-0")
    cache.held = {NAMES[1]}
    await eventually(lambda: in_step(reader, cache))


# --- what strangers may have written ---


BAD_ENTRIES: list[dict[str, bytes | int]] = [
    {"n": b"x", "add": b"", "remove": b""},
    {"n": b"9" * 5000, "add": b"", "remove": b""},
    {"x": b"y"},
    {"n": 2},
    {"n": 2, "add": b"short", "remove": b""},
    {"n": 2, "add": b"", "remove": b"x" * 17},
]


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=lambda entry: str(entry)[:40])
async def test_a_bad_log_entry_costs_the_names_only(
    follower: PrefixFollower, raw: redis.asyncio.Redis, entry: dict[str, bytes | int]
) -> None:
    await raw.sadd(SET_KEY, NAMES[0])
    await raw.xadd(LOG_KEY, {"n": 1, "all": b""})
    reader = follower.reader(PARTY)
    await reader.update()
    await raw.xadd(LOG_KEY, entry)  # type: ignore[arg-type]
    with pytest.raises(DirectoryError) as caught:
        await reader.update()
    assert not isinstance(caught.value, DirectoryAwayError)
    assert reader.names == set()
    await raw.delete(LOG_KEY)
    await raw.xadd(LOG_KEY, {"n": 3, "all": b""})
    await reader.update()
    assert reader.names == {NAMES[0]}


@pytest.mark.parametrize("key", [SET_KEY, LOG_KEY])
async def test_a_key_of_another_type(
    follower: PrefixFollower, raw: redis.asyncio.Redis, redis_url: str, cache: Cache, key: str
) -> None:
    """The reader says so, and the publisher puts it right."""
    cache.add(*NAMES[:3])
    if key == SET_KEY:
        await raw.xadd(LOG_KEY, {"n": 1, "all": b""})
    await raw.rpush(key, "x")
    reader = follower.reader(PARTY)
    with pytest.raises(DirectoryError) as caught:
        await reader.update()
    assert not isinstance(caught.value, DirectoryAwayError)
    async with publishing(redis_url, cache):
        await eventually(lambda: in_step(reader, cache))


@pytest.mark.parametrize("name", [b"short", b"x" * 17])
async def test_a_bad_name(follower: PrefixFollower, raw: redis.asyncio.Redis, name: bytes) -> None:
    await raw.sadd(SET_KEY, NAMES[0], name)
    await raw.xadd(LOG_KEY, {"n": 1, "all": b""})
    reader = follower.reader(PARTY)
    with pytest.raises(DirectoryError):
        await reader.update()
    assert reader.names == set()


async def test_too_many_names(
    follower: PrefixFollower, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MAX_NAMES", 10)
    await raw.sadd(SET_KEY, *NAMES[:11])
    await raw.xadd(LOG_KEY, {"n": 1, "all": b""})
    reader = follower.reader(PARTY)
    with pytest.raises(DirectoryError):
        await reader.update()
    await raw.srem(SET_KEY, NAMES[0])
    await reader.update()
    await raw.xadd(LOG_KEY, {"n": 2, "add": b"".join(NAMES[50:60]), "remove": b""})
    with pytest.raises(DirectoryError):
        await reader.update()
    assert reader.names == set()


async def _holds(raw: redis.asyncio.Redis, cache: Cache) -> bool:
    return await raw.smembers(SET_KEY) == cache.held
