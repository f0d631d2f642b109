"""Who is in the cluster: each node's record in Redis, written every heartbeat, gone when the node is.

Nodes write, the router reads; nothing on a request's path waits for Redis. What is read is untrusted: size, schema
and addresses are checked, and a bad record is skipped with a log line and hides no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from ipaddress import ip_address
from typing import Annotated, Any, Final, Literal

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from cluster.config import ConfigError, check_redis_url
from cluster.wire import NODE_ID_PATTERN, Party

log = logging.getLogger(__name__)

NODES_KEY: Final = "baton:nodes"
HEARTBEAT_S: Final = 1.0
EXPIRY_S: Final = 4
MAX_RECORD_BYTES: Final = 64 << 10
MAX_NODES: Final = 4096
MAX_SIZE: Final = 2**40
SCAN_STEP: Final = 512
SOCKET_TIMEOUT_S: Final = 1.0
READ_TIMEOUT_S: Final = 3.0
RETRY_CAP_S: Final = 5.0
_ADDRESS = re.compile(r"(?:tcp|http)://(.{1,253}):([0-9]{1,5})")
_NODE_ID = re.compile(NODE_ID_PATTERN)

Role = Literal["prefill", "decode"]


class MembershipError(Exception):
    """Redis could not be reached or refused us; the caller goes on with what it last knew."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells about itself. Nodes may work together only if their ``fingerprint`` is equal.

    ``layout`` is what went into it, by name, so that a router can say in what two nodes differ.
    """

    role: Role
    party: Party
    http_address: str
    fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    transports: tuple[str, ...]
    layout: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=40)], Annotated[str, msgspec.Meta(max_length=400)]],
        msgspec.Meta(max_length=16),
    ] = msgspec.field(default_factory=dict)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(NodeRecord)


def parse_record(raw: bytes) -> NodeRecord:
    """Check bytes from Redis. Raises :class:`MembershipError` for anything a node of ours would not write."""
    if len(raw) > MAX_RECORD_BYTES:
        raise MembershipError(f"record of {len(raw)} bytes refused")
    try:
        record = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MembershipError(f"record does not match the schema: {error}") from error
    _check_addresses(record)
    sizes = (record.block_size, record.num_blocks, record.max_model_len)
    if min(sizes) < 1 or max(sizes) > MAX_SIZE:
        raise MembershipError("sizes must be positive and not absurd")
    return record


def connect(redis_url: str) -> redis.Redis:
    """A client that connects when it is first used. Raises :class:`ConfigError` for a URL it cannot use."""
    check_redis_url(redis_url)
    try:
        client: redis.Redis = redis.Redis.from_url(
            redis_url, protocol=2, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=SOCKET_TIMEOUT_S
        )
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # opens nothing, checks the options
    except (ValueError, TypeError) as error:
        raise ConfigError("--redis has options that Redis clients do not know") from error
    return client


class Membership:
    """One process's view of the node table. Owns its Redis connection pool."""

    def __init__(self, redis_url: str) -> None:
        self._redis = connect(redis_url)
        self._complaints: dict[str, str] = {}

    async def write(self, record: NodeRecord) -> None:
        """Refresh this node's record for another :data:`EXPIRY_S` seconds."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(_node_key(record.party.id), _encoder.encode(record), ex=EXPIRY_S)
                pipe.sadd(NODES_KEY, record.party.id)
                await pipe.execute()
        except (RedisError, OSError) as error:
            raise MembershipError(f"cannot write to Redis: {type(error).__name__}") from error

    async def remove(self, node_id: str) -> None:
        """Take this node off the table (a clean stop)."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.delete(_node_key(node_id))
                pipe.srem(NODES_KEY, node_id)
                await pipe.execute()
        except (RedisError, OSError) as error:
            raise MembershipError(f"cannot write to Redis: {type(error).__name__}") from error

    async def read(self) -> dict[str, NodeRecord]:
        """All live records by node id; ids whose record has expired are taken off the set."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                ids = await self._ids()
                values = await self._values(ids)
                if gone := [node_id for node_id in ids if values[node_id] == b""]:
                    await self._redis.srem(NODES_KEY, *gone)
        except (RedisError, OSError, ValueError) as error:
            raise MembershipError(f"cannot read from Redis: {type(error).__name__}") from error
        records: dict[str, NodeRecord] = {}
        complaints: dict[str, str] = {}
        for node_id, value in values.items():
            if value == b"":
                continue
            try:
                records[node_id] = _checked(node_id, value)
            except MembershipError as error:
                complaints[node_id] = str(error)
                if self._complaints.get(node_id) != str(error):
                    log.warning("skipped the record of node %s: %s", node_id, error)
        self._complaints = complaints
        return records

    async def _ids(self) -> list[str]:
        """Node ids in order; never more than :data:`MAX_NODES`, however many somebody has put into the set."""
        found: set[str] = set()
        async for raw in self._redis.sscan_iter(NODES_KEY, count=SCAN_STEP):
            if isinstance(raw, bytes) and _NODE_ID.match(text := raw.decode(errors="replace")):
                found.add(text)
            if len(found) >= MAX_NODES:
                break
        return sorted(found)

    async def _values(self, ids: list[str]) -> dict[str, Any]:
        """What lies under each node's key: bytes, empty if there is nothing, or the error for that key alone.

        GETRANGE sends no more than is asked for, whatever the size of the value.
        """
        if not ids:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for node_id in ids:
                pipe.getrange(_node_key(node_id), 0, MAX_RECORD_BYTES)
            return dict(zip(ids, await pipe.execute(raise_on_error=False), strict=True))

    async def keep_registered(self, record: NodeRecord) -> None:
        """Write the heartbeat until cancelled; when Redis is away, retry with jittered back-off and carry on."""
        delay = HEARTBEAT_S
        while True:
            try:
                await self.write(record)
                delay = HEARTBEAT_S
            except MembershipError as error:
                delay = min(RETRY_CAP_S, delay * 2)
                log.warning("%s; next try in about %.1f s", error, delay)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                continue
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def _checked(node_id: str, value: object) -> NodeRecord:
    if isinstance(value, ResponseError):
        raise MembershipError("its key holds another type than a string")
    if not isinstance(value, bytes):
        raise MembershipError("its key cannot be read")
    record = parse_record(value)
    if record.party.id != node_id:
        raise MembershipError("it is the record of another node")
    return record


def _check_addresses(record: NodeRecord) -> None:
    """Both addresses are on one host, the one that speaks for the node; the form of the first is the wire's."""
    control, http = _ADDRESS.fullmatch(record.party.address), _ADDRESS.fullmatch(record.http_address)
    if control is None or http is None or not record.http_address.startswith("http://"):
        raise MembershipError("address is not of the form scheme://host:port")
    host = control[1].strip("[]")
    if http[1].strip("[]") != host:
        raise MembershipError("its two addresses are on different hosts")
    if not all(0 < int(port) < 65536 for port in (control[2], http[2])):
        raise MembershipError("port is out of range")
    try:
        address = ip_address(host)
    except ValueError:
        return  # a host name
    if address.is_unspecified or address.is_multicast or address.is_link_local:
        raise MembershipError("address cannot be that of a node")


def _node_key(node_id: str) -> str:
    return f"baton:node:{node_id}"
