"""A client that costs little: raw HTTP/1.1 over kept connections, and a direct conversation with nodes."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.channel import Channel
from cluster.config import ClusterConfig, new_epoch
from cluster.membership import Membership
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import Granted, Reserve, Submit, Token0, Tokens

PROMPT = list(range(1000, 1032))
NUM_TOKENS = 64
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds from sending a request to its first token, and from there to its end."""

    first_s: float
    rest_s: float


def request_bytes(path: str = "/v1/completions") -> bytes:
    """A streamed completion of :data:`NUM_TOKENS` tokens."""
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    )
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


class Connection:
    """One kept connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """To a server on this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    async def ask(self, request: bytes) -> Seen:
        """Send, and read to the end of the answer. Raises RuntimeError for anything but a whole stream."""
        began = time.perf_counter()
        self._writer.write(request)
        first_s, last = 0.0, b""
        while True:
            data = await self._reader.read(1 << 18)
            if not data:
                raise RuntimeError("the server hung up")
            if not first_s and b"data:" in data:
                first_s = time.perf_counter()
            last = last[-16:] + data
            if last.endswith(b"0\r\n\r\n"):
                break
        if _DONE not in last:
            raise RuntimeError(f"not a whole stream: {last[-200:]!r}")
        return Seen(first_s - began, time.perf_counter() - first_s)

    async def body(self, request: bytes) -> bytes:
        """The frames of one answer, as they are without HTTP's chunks. Raises ValueError if there are none."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(head)
        frames = b""
        while size := int((await self._reader.readline()).strip(), 16):
            frames += await self._reader.readexactly(size)
            await self._reader.readline()
        await self._reader.readline()
        return frames

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


async def throughput(port: int, request: bytes, concurrency: int, seconds: float) -> float:
    """Answers a second with so many connections that each ask again at once."""
    connections = [await Connection.open(port) for _ in range(concurrency)]
    for connection in connections:
        await connection.ask(request)
    done, until = 0, time.perf_counter() + seconds

    async def worker(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await connection.ask(request)
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(worker(connection) for connection in connections))
    elapsed = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return done / elapsed


async def latency(ask: Callable[[], Awaitable[Seen]], count: int) -> Seen:
    """Medians of ``count`` requests one after the other."""
    seen = [await ask() for _ in range(count)]
    return Seen(statistics.median(one.first_s for one in seen), statistics.median(one.rest_s for one in seen))


class Direct:
    """A router's part of the conversation without a router: reserve, submit, read tokens."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._channel = Channel(ClusterConfig("bench-direct", new_epoch(), redis_url, "127.0.0.1", "127.0.0.1", None))
        self._count = 0

    async def __aenter__(self) -> Direct:
        await self._channel.__aenter__()
        membership = Membership(self._redis_url)
        self._nodes = {record.role: record.party for record in (await membership.read()).values()}
        await membership.close()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._channel.__aexit__(None, None, None)

    async def ask(self) -> Seen:
        """One request, token by token."""
        self._count += 1
        key = RequestKey(RequestId(f"direct-{self._count}"), 0)
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        began = time.perf_counter()
        reserve = Reserve(
            key=key,
            prefill=self._nodes["prefill"],
            prompt_len=len(PROMPT),
            block_hashes=(),
            seed_hash=bytes(16),
            sampling=sampling,
            deadline_s=60.0,
        )
        self._channel.send(self._nodes["decode"], reserve)
        first_s = 0.0
        while True:
            match (await self._channel.receive()).body:
                case Granted(_key, ticket):
                    submit = Submit(
                        key=key,
                        prompt_token_ids=tuple(PROMPT),
                        block_hashes=(),
                        sampling=sampling,
                        ticket=ticket,
                        deadline_s=60.0,
                    )
                    self._channel.send(self._nodes["prefill"], submit)
                case Token0():
                    first_s = time.perf_counter()
                case Tokens(_step, items) if any(item.finish_reason for item in items):
                    return Seen(first_s - began, time.perf_counter() - first_s)
