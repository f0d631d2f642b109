"""Below HTTP: heads without end, connections without a request, bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from front_harness import Front

from router.protocol import BoundedHttpProtocol

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def connect(front: Front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = front.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # the server may have been first
        await writer.wait_closed()


@pytest.mark.parametrize("line", [b"x: " + b"a" * 1000 + b"\r\n", b"a" * 1000], ids=["many headers", "one header"])
async def test_t7_p3_a_head_without_end(front: Front, line: bytes) -> None:
    reader, writer = await connect(front)
    writer.write(b"GET /health HTTP/1.1\r\nx: ")
    closed = asyncio.create_task(reader.read())
    try:
        while not closed.done():
            writer.write(line)
            await writer.drain()
    except ConnectionError:
        pass
    await asyncio.wait([closed])
    await hang_up(writer)
    # The refusal may be lost when the server closes on bytes it has not read; the connection never stays.
    assert closed.exception() is not None or b"too large" in closed.result()


async def test_a_head_of_ordinary_size(front: Front) -> None:
    headers = {f"x-{index}": "a" * 1000 for index in range(30)}
    for _ in range(3):
        assert (await front.http.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("content", [b"", b"GET /health HTT"], ids=["nothing", "half a line"])
async def test_t8_p23_a_slow_head(front: Front, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.01)
    reader, writer = await connect(front)
    writer.write(content)
    assert await reader.read() == b""
    await hang_up(writer)


async def test_the_deadline_ends_with_the_head(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    expired = asyncio.Event()
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.2)
    front.replay("x")
    front.generator.script = [expired, *front.generator.script]
    request = asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"}))
    await front.generator.opened.wait()
    idle, writer = await connect(front)
    assert await idle.read() == b""  # a deadline of the same length has passed meanwhile
    await hang_up(writer)
    expired.set()
    assert (await request).status_code == 200


@pytest.mark.parametrize(
    "content", [b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01\x00", b"GET /health HTTP/9.9\r\n\r\n"]
)
async def test_what_is_not_http(front: Front, content: bytes) -> None:
    reader, writer = await connect(front)
    writer.write(content)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    await hang_up(writer)
    assert (await front.http.get("/health")).status_code == 200
