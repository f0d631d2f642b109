"""A real Redis-compatible server, one for all tests, empty for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio

from tests.cluster.redis_server import RedisServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(shared_server: RedisServer) -> str:
    with redis.Redis.from_url(shared_server.url) as client:
        client.flushall()
    return shared_server.url


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client that writes whatever a stranger might write."""
    client = redis.asyncio.Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may stop and start; not started yet."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()
