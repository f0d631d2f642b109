"""The prefix index over a real server: one node's bad keys never hide another's names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from cluster.directory import PrefixFollower
from cluster.wire import Party
from router.directory_index import DirectoryIndex
from router.naming import PromptNames
from router.policy import Candidate
from tests.cluster.conftest import own_server, raw, redis_url, shared_server
from tests.cluster.redis_server import RedisServer

__all__ = ["own_server", "raw", "redis_url", "shared_server"]

NAMES = PromptNames(tuple(range(70)), "")
BLOCKS = NAMES.of("f", 16)[1]


def node(name: str) -> Candidate:
    return Candidate(Party(name, 1, "tcp://127.0.0.1:1"), "f", 16, 512)


NODES = [node("a"), node("b"), node("c")]


@pytest.fixture
async def index(redis_url: str) -> AsyncIterator[DirectoryIndex]:
    follower = PrefixFollower(redis_url)
    yield DirectoryIndex(follower, lambda: [entry.party for entry in NODES])
    await follower.close()


async def _hold(raw: redis.asyncio.Redis, name: str, *blocks: bytes) -> None:
    await raw.sadd(f"baton:kv:{name}:1", *blocks)
    await raw.xadd(f"baton:kvlog:{name}:1", {"n": 1, "all": b""})


async def test_the_longest_run_from_the_start_counts(index: DirectoryIndex, raw: redis.asyncio.Redis) -> None:
    await _hold(raw, "a", *BLOCKS[:3])
    await _hold(raw, "b", BLOCKS[0], *BLOCKS[2:])
    await _hold(raw, "c", *BLOCKS[1:])
    assert [index.cached_tokens(entry, NAMES) for entry in NODES] == [0, 0, 0]
    await index.update()
    assert [index.cached_tokens(entry, NAMES) for entry in NODES] == [48, 16, 0]
    assert index.cached_tokens(node("unknown"), NAMES) == 0


async def test_another_salt_hits_nothing(index: DirectoryIndex, raw: redis.asyncio.Redis) -> None:
    await _hold(raw, "a", *BLOCKS)
    await index.update()
    assert index.cached_tokens(NODES[0], PromptNames(tuple(range(70)), "salt")) == 0


@pytest.mark.parametrize("key", ["baton:kv:a:1", "baton:kvlog:a:1"])
async def test_a_key_of_another_type_hides_nobody(
    index: DirectoryIndex, raw: redis.asyncio.Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    await raw.xadd("baton:kvlog:a:1", {"n": 1, "all": b""})
    await raw.delete(key)
    await raw.rpush(key, "x")
    await _hold(raw, "b", *BLOCKS)
    for _ in range(3):
        await index.update()
    assert [index.cached_tokens(entry, NAMES) for entry in NODES] == [0, 64, 0]
    assert len([line for line in caplog.messages if line.startswith("a:")]) == 1


async def test_redis_away(own_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    follower = PrefixFollower(own_server.url)
    index = DirectoryIndex(follower, lambda: [entry.party for entry in NODES])
    for _ in range(3):
        await index.update()
    assert len([line for line in caplog.messages if "Redis" in line]) == 1
    own_server.start()
    async with redis.asyncio.Redis.from_url(own_server.url) as client:
        await _hold(client, "a", *BLOCKS)
    await index.update()
    own_server.stop()
    await index.update()
    assert index.cached_tokens(NODES[0], NAMES) == 64, "what was known stays known"
    await follower.close()


async def test_nodes_that_are_gone_are_forgotten(redis_url: str, raw: redis.asyncio.Redis) -> None:
    alive = [NODES[0].party, NODES[1].party]
    follower = PrefixFollower(redis_url)
    index = DirectoryIndex(follower, lambda: alive)
    await _hold(raw, "a", *BLOCKS)
    await index.update()
    assert len(index._readers) == 2
    alive.pop(0)
    await index.update()
    assert list(index._readers) == [NODES[1].party]
    assert index.cached_tokens(NODES[0], NAMES) == 0
    await follower.close()


def test_names_are_kept_for_each_layout() -> None:
    assert NAMES.of("f", 16) is NAMES.of("f", 16)
    assert NAMES.of("f", 32) != NAMES.of("f", 16)
    assert NAMES.of("g", 16) != NAMES.of("f", 16)
