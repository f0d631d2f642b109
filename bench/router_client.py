"""A client that costs little: raw HTTP/1.1 over kept connections, without a parser."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

PROMPT = list(range(1000, 1032))
NUM_TOKENS = 64
_DONE = b"data: [DONE]\n\n"
_END = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer: when it was asked for, when each of its frames came (``time.monotonic()``), and its bytes."""

    asked_s: float
    frames_s: list[float]
    raw: bytes

    @property
    def first_s(self) -> float:
        """Seconds from the question to the first frame."""
        return self.frames_s[0] - self.asked_s


def request_bytes(prompt: str | list[int] = PROMPT, **more: str) -> bytes:
    """A streamed completion of :data:`NUM_TOKENS` tokens."""
    options = {"max_tokens": NUM_TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"prompt": prompt, **options, **more})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n{body}".encode()


class Connection(asyncio.Protocol):
    """One kept connection, one question at a time."""

    _transport: asyncio.Transport
    _answer: asyncio.Future[Seen] | None = None
    _asked_s = 0.0

    def __init__(self) -> None:
        self._frames_s: list[float] = []
        self._parts: list[bytes] = []
        self._tail = b""

    @classmethod
    async def open(cls, port: int) -> Connection:
        """To a server on this machine."""
        _transport, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def ask(self, request: bytes) -> Seen:
        """Send, and read to the end of the answer. Raises RuntimeError for anything but a whole stream."""
        self._frames_s, self._parts, self._tail = [], [], b""
        self._answer = asyncio.get_running_loop().create_future()
        self._asked_s = time.monotonic()
        self._transport.write(request)
        seen = await self._answer
        if _DONE not in seen.raw[-64:]:
            raise RuntimeError(f"not a whole stream: {seen.raw[-200:]!r}")
        return seen

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._frames_s += [time.monotonic()] * data.count(b"data:")
        self._parts.append(data)
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            self._end(Seen(self._asked_s, self._frames_s, b"".join(self._parts)))
        elif len(self._parts) == 1 and not data.startswith(b"HTTP/1.1 200"):
            self._end(RuntimeError(f"not a stream: {data[:200]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end(RuntimeError(f"the server hung up: {exc}"))

    def _end(self, outcome: Seen | RuntimeError) -> None:
        if self._answer is None or self._answer.done():
            return
        if isinstance(outcome, Seen):
            self._answer.set_result(outcome)
        else:
            self._answer.set_exception(outcome)


def frames_of(raw: bytes) -> list[bytes]:
    """The frames of one answer, without HTTP's head and chunks."""
    _head, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while size := int(rest[: rest.index(b"\r\n")], 16):
        start = rest.index(b"\r\n") + 2
        body += rest[start : start + size]
        rest = rest[start + size + 2 :]
    return [frame + b"\n\n" for frame in body.split(b"\n\n") if frame]


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask: its port on this machine and its process."""

    name: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Answers a second, and a second of the server's processor time."""

    per_s: float
    per_cpu_s: float


async def throughput(server: Server, request: bytes, concurrency: int, seconds: float) -> Rate:
    """With so many connections that each ask again at once."""
    connections = [await Connection.open(server.port) for _ in range(concurrency)]
    for connection in connections:
        await connection.ask(request)
    done, until = 0, time.monotonic() + seconds

    async def worker(connection: Connection) -> None:
        nonlocal done
        while time.monotonic() < until:
            await connection.ask(request)
            done += 1

    began_s, began_cpu_s = time.monotonic(), _cpu_s(server.pid)
    await asyncio.gather(*(worker(connection) for connection in connections))
    rate = Rate(done / (time.monotonic() - began_s), done / (_cpu_s(server.pid) - began_cpu_s))
    for connection in connections:
        connection.close()
    return rate


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
