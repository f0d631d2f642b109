"""The parts of `baton bench router` that can be wrong without anybody noticing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.router_bare import app_of
from bench.router_client import NUM_TOKENS, Connection, frames_of
from bench.router_nodes import Stamps
from bench.router_peers import programs
from tests.cluster.redis_server import eventually


def test_frames_without_http() -> None:
    raw = b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n9\r\ndata: a\n\n\r\n17\r\ndata: b\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    assert frames_of(raw) == [b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n"]


async def test_a_frame_is_timed_when_it_comes_and_a_broken_answer_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n9\r\ndata: a\n\n\r\n")
        await reader.readline()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await reader.readline()
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        await reader.readline()
        writer.close()

    async with asyncio.timeout(20), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = await Connection.open(server.sockets[0].getsockname()[1])
        asking = asyncio.create_task(connection.ask(b"one\n"))
        await eventually(lambda: connection._frames_s)
        connection._transport.write(b"go on\n")
        seen = await asking
        assert seen.asked_s < seen.frames_s[0] < seen.frames_s[1]
        with pytest.raises(RuntimeError, match="503"):
            await connection.ask(b"two\n")
        with pytest.raises(RuntimeError, match="hung up"):
            await connection.ask(b"three\n")
        connection.close()


def test_stamps_are_shared_through_the_file(tmp_path: Path) -> None:
    node, client = Stamps(tmp_path / "stamps"), Stamps(tmp_path / "stamps")
    node.set(NUM_TOKENS - 1)
    assert client.all()[-1] > 0
    assert client.all()[:-1] == [0.0] * (NUM_TOKENS - 1)


async def test_the_bare_app_sends_each_frame_by_itself() -> None:
    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        if message.get("body"):
            sent.append(message["body"])  # type: ignore[arg-type]

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    await app_of([b"a", b"b"])({"method": "POST"}, receive, send)
    assert sent == [b"a", b"b"]


def test_named_routers_come_before_those_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("sglang-router", "vllm-router"):
        (tmp_path / name).touch(mode=0o755)
    assert programs(["/x/vllm-router"]) == [tmp_path / "sglang-router", Path("/x/vllm-router")]
    with pytest.raises(ValueError, match="nginx"):
        programs(["/usr/sbin/nginx"])
