"""The node table in a real server: what nodes write is read, and what anybody else wrote does no harm."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import redis.asyncio

from cluster import membership as membership_module
from cluster.config import ConfigError
from cluster.membership import (
    EXPIRY_S,
    MAX_RECORD_BYTES,
    NODES_KEY,
    Membership,
    MembershipError,
    NodeRecord,
    parse_record,
)
from cluster.wire import Party
from tests.cluster.redis_server import RedisServer, eventually


def record(name: str = "decode-0", epoch: int = 1, **changes: Any) -> NodeRecord:
    made = NodeRecord(
        role="decode",
        party=Party(name, epoch, "tcp://127.0.0.1:4000"),
        http_address="http://127.0.0.1:4001",
        fingerprint="layout",
        block_size=16,
        num_blocks=64,
        max_model_len=512,
        transports=("tcp",),
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
async def table(redis_url: str) -> AsyncIterator[Membership]:
    opened = Membership(redis_url)
    yield opened
    await opened.close()


async def test_what_is_written_is_read(table: Membership) -> None:
    assert await table.read() == {}
    written = {name: record(name) for name in ("b", "a", "c")}
    for entry in written.values():
        await table.write(entry)
    assert await table.read() == written
    assert list(await table.read()) == ["a", "b", "c"]
    await table.remove("b")
    await table.remove("never-there")
    assert list(await table.read()) == ["a", "c"]


async def test_a_new_life_replaces_the_old_one(table: Membership) -> None:
    await table.write(record(epoch=1))
    await table.write(record(epoch=2))
    assert (await table.read())["decode-0"].party.epoch == 2


async def test_a_record_expires_and_its_id_goes_too(table: Membership, raw: redis.asyncio.Redis) -> None:
    await table.write(record("a"))
    await table.write(record("b"))
    assert 0 < await raw.ttl("baton:node:a") <= EXPIRY_S
    await raw.pexpire("baton:node:a", 1)
    await eventually(lambda: _reads(table, {"b"}))
    assert await raw.smembers(NODES_KEY) == {b"b"}


async def test_the_heartbeat_writes_again(table: Membership, raw: redis.asyncio.Redis) -> None:
    async with _registered(table, record("a")):
        await eventually(lambda: _reads(table, {"a"}))
        await raw.flushall()
        await eventually(lambda: _reads(table, {"a"}))


async def test_nodes_are_back_after_redis_came_back_empty(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Away when the node starts, there, away, and there again with nothing in it."""
    monkeypatch.setattr(membership_module, "HEARTBEAT_S", 0.05)
    table = Membership(own_server.url)
    try:
        async with _registered(table, record("a")), _registered(table, record("b")):
            with pytest.raises(MembershipError):
                await table.read()
            for _ in range(2):
                own_server.start()
                await eventually(lambda: _reads(table, {"a", "b"}))
                own_server.stop()
                with pytest.raises(MembershipError):
                    await table.read()
                with pytest.raises(MembershipError):
                    await table.write(record("a"))
                with pytest.raises(MembershipError):
                    await table.remove("a")
    finally:
        await table.close()


async def test_a_silent_redis_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "SOCKET_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # takes connections, never says a word
        table = Membership(f"redis://127.0.0.1:{nobody.getsockname()[1]}/0")
        with pytest.raises(MembershipError):
            await table.read()
        await table.close()


async def test_a_wrong_password_is_a_membership_error(own_server: RedisServer) -> None:
    own_server.start()
    head, _at, tail = own_server.url.partition("@")
    table = Membership(f"{head}x@{tail}")
    with pytest.raises(MembershipError):
        await table.read()
    with pytest.raises(MembershipError):
        await table.write(record())
    await table.close()


@pytest.mark.parametrize("url", ["http://h", "redis://h:port", "redis://h/0?nonsense=1", "redis://h/0?protocol=x"])
def test_a_url_that_cannot_work_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError):
        Membership(url)


# --- what strangers may have written ---


async def test_hostile_values_hide_no_other_node(
    table: Membership, raw: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    good = msgspec.json.encode(record("good"))
    await raw.rpush("baton:node:a-list", "x")
    await raw.hset("baton:node:a-hash", "x", "y")
    await raw.xadd("baton:node:a-stream", {"x": "y"})
    await raw.set("baton:node:a-pickle", b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94.")
    await raw.set("baton:node:other-name", good)
    await raw.set("baton:node:good", good)
    await raw.setrange("baton:node:huge", 100 << 20, b"x")
    names = ["a-list", "a-hash", "a-stream", "a-pickle", "other-name", "huge", "good"]
    await raw.sadd(NODES_KEY, *names, "bad name\r\n", b"\xff\xfe", "x" * 200, "../../etc", "")
    assert await table.read() == {"good": record("good")}
    complaints = [line for line in caplog.messages if "skipped" in line]
    assert len(complaints) == 6
    assert await table.read() == {"good": record("good")}
    assert [line for line in caplog.messages if "skipped" in line] == complaints  # said once, not twice a second


async def test_a_huge_value_is_not_fetched(table: Membership, raw: redis.asyncio.Redis) -> None:
    await raw.setrange("baton:node:huge", 100 << 20, b"x")
    await raw.sadd(NODES_KEY, "huge")
    before = (await raw.info("stats"))["total_net_output_bytes"]
    assert await table.read() == {}
    sent = (await raw.info("stats"))["total_net_output_bytes"] - before
    assert sent < 2 * MAX_RECORD_BYTES


async def test_a_huge_set_of_ids_is_cut(
    table: Membership, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "MAX_NODES", 50)
    monkeypatch.setattr(membership_module, "SCAN_STEP", 10)
    await raw.sadd(NODES_KEY, *(f"ghost-{i}" for i in range(5000)))
    assert await table.read() == {}
    assert await raw.scard(NODES_KEY) < 5000  # those looked at were gone, and are no longer listed


async def test_a_set_of_another_type_is_a_membership_error(table: Membership, raw: redis.asyncio.Redis) -> None:
    await raw.set(NODES_KEY, "x")
    with pytest.raises(MembershipError):
        await table.read()
    with pytest.raises(MembershipError):
        await table.write(record())


def damaged(**changes: Any) -> bytes:
    data = msgspec.json.decode(msgspec.json.encode(record()))
    return msgspec.json.encode(data | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "router"},
        {"role": None},
        {"party": ["decode-0", 1, "http://169.254.169.254/"]},
        {"party": ["decode-0", 1, "tcp://169.254.169.254:80"], "http_address": "http://169.254.169.254:80"},
        {"party": ["decode-0", 1, "tcp://0.0.0.0:80"], "http_address": "http://0.0.0.0:80"},
        {"party": ["decode-0", 1, "tcp://224.0.0.1:80"], "http_address": "http://224.0.0.1:80"},
        {"party": ["decode-0", 1, "tcp://[fe80::1]:80"], "http_address": "http://[fe80::1]:80"},
        {"party": ["decode-0", 1, "tcp://127.0.0.1:0"]},
        {"party": ["decode-0", 1, "tcp://127.0.0.1:65536"]},
        {"party": ["decode-0", 1, "ipc:///tmp/x"]},
        {"party": ["decode\n0", 1, "tcp://127.0.0.1:4000"]},
        {"party": ["decode-0", -1, "tcp://127.0.0.1:4000"]},
        {"party": ["decode-0", 2**63, "tcp://127.0.0.1:4000"]},
        {"party": ["decode-0", 1, "tcp://127.0.0.1:4000", "more"]},
        {"http_address": "http://10.0.0.1:4001"},
        {"http_address": "http://127.0.0.1:4001/../admin"},
        {"http_address": "https://127.0.0.1:4001"},
        {"http_address": "http://user@127.0.0.1:4001"},
        {"http_address": "tcp://127.0.0.1:4001"},
        {"http_address": "http://127.0.0.1:99999"},
        {"block_size": 0},
        {"block_size": "16"},
        {"num_blocks": -1},
        {"num_blocks": 2**62},
        {"max_model_len": 10**400},
        {"transports": "tcp"},
        {"fingerprint": 5},
        {"layout": {f"fact {i}": "x" for i in range(17)}},
        {"layout": {"dtype": "x" * 401}},
        {"layout": {"dtype": 32}},
    ],
    ids=str,
)
def test_a_record_no_node_would_write_is_refused(changes: dict[str, Any]) -> None:
    try:
        raw = damaged(**changes)
    except OverflowError:
        raw = damaged(max_model_len=0).replace(b'"max_model_len":0', b'"max_model_len":1' + b"0" * 400)
    with pytest.raises(MembershipError):
        parse_record(raw)


@pytest.mark.parametrize(
    "raw",
    [b"", b"null", b"[]", b"{}", b"{" * 100_000, b'{"role":' * 20_000, b"\xff\xfe", b"x" * (MAX_RECORD_BYTES + 1)],
    ids=lambda raw: f"{raw[:8]!r}x{len(raw)}",
)
def test_bytes_that_are_no_record(raw: bytes) -> None:
    with pytest.raises(MembershipError):
        parse_record(raw)


def test_a_good_record_is_taken() -> None:
    assert parse_record(msgspec.json.encode(record())) == record()
    named = record(party=Party("n", 1, "tcp://decode-0.local:1"), http_address="http://decode-0.local:65535")
    assert parse_record(msgspec.json.encode(named)) == named
    six = record(party=Party("n", 1, "tcp://[::1]:1"), http_address="http://::1:2")
    assert parse_record(msgspec.json.encode(six)) == six


async def _reads(table: Membership, expected: set[str]) -> bool:
    try:
        return set(await table.read()) == expected
    except MembershipError:
        return False


@contextlib.asynccontextmanager
async def _registered(table: Membership, entry: NodeRecord) -> AsyncIterator[None]:
    beating = asyncio.create_task(table.keep_registered(entry))
    try:
        yield
    finally:
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating
