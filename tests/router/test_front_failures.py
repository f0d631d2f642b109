"""Failures behind the front and clients that leave: one clear ending each, nothing left running."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from fake_generator import deltas
from front_harness import MODEL, Front

from cluster.errors import BatonError, DeadlineError, EngineError, NoUsablePairError, OverloadedError, WorkerLostError
from router.generation import Readiness

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BODIES = [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"}), (COMPLETIONS, {"prompt": ["x", "y"]})]


async def check_healthy(front: Front) -> None:
    assert front.generator.num_open == 0
    front.replay("ok")
    assert (await front.http.post(COMPLETIONS, json={"prompt": "x"})).json()["choices"][0]["text"] == "ok"
    assert (await front.http.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("error", "retry_after", "outcome"),
    [
        (OverloadedError("The queue is full.", retry_after_s=2.5), "3", "overloaded"),
        (NoUsablePairError("No nodes."), "1", "unavailable"),
        (WorkerLostError("A node was lost."), "1", "unavailable"),
        (DeadlineError("Too late."), None, "unavailable"),
        (EngineError("Bad numbers."), None, "error"),
    ],
)
async def test_d7_an_error_before_the_first_token(
    front: Front,
    error: BatonError,
    retry_after: str | None,
    outcome: str,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    endpoint = "chat" if path == CHAT else "completions"
    before = front.metrics.count(endpoint, outcome)
    front.generator.script = [error]
    response = await front.http.post(path, json=body | {"stream": stream})
    assert response.status_code == error.status
    expected = {"message": error.message, "type": error.kind, "param": None, "code": error.code}
    assert response.json() == {"error": expected}
    assert response.headers.get("retry-after") == retry_after
    assert (response.headers.get("x-should-retry") == "false") == isinstance(error, EngineError)
    assert front.metrics.count(endpoint, outcome) == before + 1
    await check_healthy(front)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_before_the_first_token(front: Front, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    front.generator.script = [RuntimeError("secret state")]
    response = await front.http.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    assert "secret" not in response.text
    assert "secret state" in caplog.text  # for us, with its traceback
    await check_healthy(front)


async def test_a_bug_in_the_front_itself(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("secret state")

    monkeypatch.setattr(front.generator, "max_request_tokens", broken)
    response = await front.http.post(COMPLETIONS, json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Internal error."
    assert response.headers["x-request-id"]
    monkeypatch.undo()
    await check_healthy(front)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("error", [WorkerLostError("A node was lost."), RuntimeError("secret state")])
async def test_s8_d6_an_error_in_the_middle(front: Front, path: str, body: dict[str, Any], error: Exception) -> None:
    front.generator.script = [*deltas([100, 101], None), error]
    response = await front.http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200
    *chunks, failure, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert failure.startswith("event: error\ndata: ")
    shown = json.loads(failure.removeprefix("event: error\ndata: "))["error"]
    assert shown["code"] == (503 if isinstance(error, WorkerLostError) else 500)
    assert "secret" not in shown["message"]
    choices = [choice for chunk in chunks for choice in json.loads(chunk.removeprefix("data: "))["choices"]]
    assert choices
    assert all(choice["finish_reason"] is None for choice in choices)
    await check_healthy(front)


async def test_openai_sees_an_error_in_the_middle(front: Front) -> None:
    front.generator.script = [*deltas([100, 101], None), WorkerLostError("A node was lost.")]
    stream = await front.client.completions.create(model=MODEL, prompt="x", stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].text
    assert (await anext(chunks)).choices[0].text
    with pytest.raises(openai.APIError, match="A node was lost"):
        await anext(chunks)
    await check_healthy(front)


@pytest.mark.parametrize("script", [[], deltas([100, 101], None)], ids=["at once", "after tokens"])
async def test_j1_a_generation_that_just_stops_is_an_error(front: Front, script: Any) -> None:
    front.generator.script = script
    response = await front.http.post(COMPLETIONS, json={"prompt": "x"})
    assert response.status_code == 500
    front.generator.script = script
    response = await front.http.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    assert (response.status_code == 500) == (not script)
    assert '"error":{' in response.text
    await check_healthy(front)


async def test_one_failed_choice_ends_the_others(front: Front) -> None:
    front.generator.script_of = {1: [asyncio.Event()], 2: [WorkerLostError("A node was lost.")]}
    response = await front.http.post(COMPLETIONS, json={"prompt": [[1], [2]]})
    assert response.status_code == 503
    assert len(front.generator.seen) == 2
    await check_healthy(front)


async def leave(front: Front, path: str, body: dict[str, Any], *, after: bytes) -> None:
    """Send a request over a bare socket, wait for ``after`` in the answer (or only for its start), hang up."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await front.generator.opened.wait()
    if after:
        await reader.readuntil(after)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("stream", "num_tokens"),
    [(False, 0), (False, 2), (True, 0), (True, 2)],
    ids=["waiting", "whole", "queued", "midway"],
)
async def test_q1_i1_a_client_that_leaves(
    front: Front, path: str, body: dict[str, Any], stream: bool, num_tokens: int
) -> None:
    endpoint = "chat" if path == CHAT else "completions"
    before = front.metrics.count(endpoint, "cancelled")
    front.generator.script = [*deltas([100] * num_tokens, None), asyncio.Event()]
    await leave(front, path, body | {"stream": stream}, after=b"data: " if stream and num_tokens else b"")
    await front.metrics.reaches(endpoint, "cancelled", before + 1)
    assert front.generator.num_finished == 0
    await check_healthy(front)


async def test_a_client_that_leaves_within_its_body(front: Front) -> None:
    before = front.metrics.count("completions", "cancelled")
    host, port = front.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await front.metrics.reaches("completions", "cancelled", before + 1)
    assert front.generator.seen == []
    await check_healthy(front)


async def test_many_clients_that_leave_and_one_that_stays(front: Front) -> None:
    before = front.metrics.count("chat", "cancelled")
    front.generator.script = [asyncio.Event()]
    await asyncio.gather(*(leave(front, CHAT, {"messages": HELLO, "stream": True}, after=b"") for _ in range(50)))
    await front.metrics.reaches("chat", "cancelled", before + 50)
    await check_healthy(front)


async def test_not_ready(front: Front) -> None:
    front.generator.readiness = Readiness(False, "no decode node")
    response = await front.http.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"ready": False, "reason": "no decode node"}
    assert response.headers["retry-after"]
    assert (await front.http.get("/health")).status_code == 200
