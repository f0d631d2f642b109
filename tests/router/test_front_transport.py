"""HTTP itself: connections that live on, frames that go out at once, headers that clients send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_generator import deltas
from front_harness import Front

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Connection:
    """One bare connection; answers are read in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def send(self, method: str, path: str, body: Any = None, *headers: str) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json", *headers]
        if not any(header.startswith("content-length") for header in headers):
            lines.append(f"content-length: {len(content)}")
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + content)

    async def head(self) -> tuple[int, dict[str, str]]:
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        return int(status.split()[1]), dict(line.split(": ", 1) for line in lines)

    async def answer(self) -> tuple[int, bytes]:
        status, headers = await self.head()
        return status, await self.reader.readexactly(int(headers["content-length"]))

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]


@asynccontextmanager
async def connection(front: Front) -> AsyncIterator[Connection]:
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(30):
            yield Connection(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_t9_a_connection_outlives_refusals_and_failures(front: Front) -> None:
    async with connection(front) as wire:
        for body, status in (({"prompt": 5}, 400), ({"prompt": "x", "model": "other"}, 404), ({"prompt": "x"}, 500)):
            front.generator.script = [RuntimeError("secret")]
            wire.send("POST", "/v1/completions", body)
            assert (await wire.answer())[0] == status
        front.generator.script = deltas([100], "length")
        wire.send("POST", "/v1/completions", {"prompt": "x"})
        assert (await wire.answer())[0] == 200


async def test_t11_t12_frames_go_out_when_they_exist(front: Front) -> None:
    """One HTTP chunk a token, before the next token exists; line feeds only; closed at once after ``[DONE]``."""
    gates = [asyncio.Event(), asyncio.Event()]
    first, second = deltas([100, 101], "length")
    front.generator.script = [gates[0], first, gates[1], second]
    async with connection(front) as wire:
        wire.send("POST", "/v1/completions", {"prompt": "x", "stream": True})
        await front.generator.opened.wait()
        gates[0].set()
        status, headers = await wire.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in headers
        assert "content-encoding" not in headers
        frames = [await wire.chunk()]
        gates[1].set()
        # What is there at the same time goes out at once.
        frames += [frame + b"\n\n" for frame in (await wire.chunk()).removesuffix(b"\n\n").split(b"\n\n")]
        assert await wire.chunk() == b""
        assert len(frames) == 3
        for frame in frames[:2]:
            assert frame.startswith(b"data: {")
            assert frame.endswith(b"}\n\n")
            assert b"\r" not in frame
            assert frame.count(b"\n") == 2
        assert frames[2] == b"data: [DONE]\n\n"
        wire.send("GET", "/health")  # the connection is free for the next request
        assert (await wire.answer())[0] == 200


async def test_t6_a_declared_length_is_refused_before_the_body_comes(front: Front) -> None:
    async with connection(front) as wire:
        wire.send("POST", "/v1/completions", None, "content-length: 999999999")
        status, body = await wire.answer()
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("header", ["authorization: Bearer ", "authorization: Bearer k", "authorization: Basic x"])
async def test_t13_without_keys_every_caller_is_let_in(front: Front, header: str) -> None:
    """lm-eval sends an empty bearer when it has no key."""
    front.replay("x")
    async with connection(front) as wire:
        wire.send("POST", "/v1/completions", {"prompt": "x"}, header)
        assert (await wire.answer())[0] == 200


async def test_what_clients_say_of_themselves_is_no_matter(front: Front) -> None:
    front.replay("x")
    headers = {
        "accept": "text/event-stream",
        "accept-encoding": "gzip, deflate, br",
        "x-stainless-lang": "python",
        "x-correlation-id": "c",
        "x-session-affinity": "s",
        "api-key": "k",
        "origin": "http://localhost:3000",
    }
    response = await front.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 200
    assert "content-encoding" not in response.headers


@pytest.mark.parametrize("num", [150])
async def test_h9_many_streams_at_once(front: Front, num: int) -> None:
    """None waits for another's end: all have their first token before any goes on."""
    gate = asyncio.Event()
    first, second = deltas([100, 101], "length")
    front.generator.script = [first, gate, second]
    async with connection(front) as one:
        wires = [one]
        stack = [connection(front) for _ in range(num - 1)]
        wires += [await each.__aenter__() for each in stack]
        try:
            for wire in wires:
                wire.send("POST", "/v1/completions", {"prompt": "x", "stream": True})
            for wire in wires:
                assert (await wire.head())[0] == 200
                assert b'"text":' in await wire.chunk()
            gate.set()
            for wire in wires:
                await wire.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        finally:
            for each in stack:
                await each.__aexit__(None, None, None)
