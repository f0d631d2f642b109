"""Who is in the cluster: each node's record in Redis, written every heartbeat, gone when the node is.

Nodes write, the router reads; nothing on a request's path waits for Redis. What is read is untrusted: size, schema
and addresses are checked, and a bad record is skipped with a log line.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from typing import Final, Literal

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from cluster.wire import Party

log = logging.getLogger(__name__)

NODES_KEY: Final = "baton:nodes"
HEARTBEAT_S: Final = 1.0
EXPIRY_S: Final = 4
MAX_RECORD_BYTES: Final = 64 << 10
MAX_NODES: Final = 4096
SOCKET_TIMEOUT_S: Final = 1.0
RETRY_CAP_S: Final = 5.0
_CONTROL_ADDRESS = re.compile(r"tcp://[A-Za-z0-9_.:\[\]-]{1,255}:[0-9]{1,5}")
_HTTP_ADDRESS = re.compile(r"http://[A-Za-z0-9_.:\[\]-]{1,255}:[0-9]{1,5}")
_NODE_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Role = Literal["prefill", "decode"]


class MembershipError(Exception):
    """Redis could not be reached or refused us; the caller goes on with what it last knew."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells about itself. Nodes may work together only if their ``fingerprint`` is equal."""

    role: Role
    party: Party
    http_address: str
    fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    transports: tuple[str, ...]


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
    if not _NODE_ID.fullmatch(record.party.id):
        raise MembershipError("node id has characters it may not have")
    if not _CONTROL_ADDRESS.fullmatch(record.party.address) or not _HTTP_ADDRESS.fullmatch(record.http_address):
        raise MembershipError("address is not of the form scheme://host:port")
    if min(record.block_size, record.num_blocks, record.max_model_len) < 1:
        raise MembershipError("sizes must be positive")
    return record


class Membership:
    """One process's view of the node table. Owns its Redis connection pool."""

    def __init__(self, redis_url: str) -> None:
        self._redis: redis.Redis = redis.Redis.from_url(
            redis_url, protocol=2, socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=SOCKET_TIMEOUT_S
        )

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
            ids = sorted(_text(raw) for raw in await self._redis.smembers(NODES_KEY))
            ids = [node_id for node_id in ids if _NODE_ID.fullmatch(node_id)][:MAX_NODES]
            if not ids:
                return {}
            values = await self._redis.mget([_node_key(node_id) for node_id in ids])
            if gone := [node_id for node_id, value in zip(ids, values, strict=True) if value is None]:
                await self._redis.srem(NODES_KEY, *gone)
        except (RedisError, OSError) as error:
            raise MembershipError(f"cannot read from Redis: {type(error).__name__}") from error
        records: dict[str, NodeRecord] = {}
        for node_id, value in zip(ids, values, strict=True):
            if value is None:
                continue
            try:
                record = parse_record(value if isinstance(value, bytes) else value.encode())
                if record.party.id != node_id:
                    raise MembershipError("record lies under another node's key")
                records[node_id] = record
            except MembershipError as error:
                log.warning("skipped a node record: %s", error)
        return records

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


def _text(raw: bytes | str) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw


def _node_key(node_id: str) -> str:
    return f"baton:node:{node_id}"
