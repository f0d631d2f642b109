"""`baton chat`: what a server streams, and what it may not do to the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from cli import chat
from cli.main import main
from cluster.config import ConfigError


def frame(text: str | None) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"delta": {"content": text}}]}) + b"\n\n"


class Server:
    """Answers in turn with what the test says; remembers what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self._answers: Iterator[httpx.Response | Exception] = iter(answers)
        self.asked: list[dict[str, Any]] = []

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://h", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m[/bold]"}]})
        self.asked.append(msgspec.json.decode(request.content))
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def streamed(*frames: bytes) -> httpx.Response:
    return httpx.Response(200, content=b"".join(frames) + b"data: [DONE]\n\n")


def test_the_pieces_of_an_answer() -> None:
    server = Server(streamed(frame(""), frame("Par"), b": comment\n\n", frame(None), frame("is")))
    with server.client() as client:
        assert list(chat.stream_text(client, {})) == ["Par", "is"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(429, json={"error": {"message": "queue is full"}}), "queue is full"),
        (httpx.Response(500, content=b"<html>"), "refused"),
        (httpx.Response(500, json=["x"]), "refused"),
        (streamed(b'event: error\ndata: {"error": {"message": "worker lost"}}\n\n'), "worker lost"),
        (streamed(b"data: {nonsense\n\n"), "frame"),
        (streamed(b"data: []\n\n"), "frame"),
        (streamed(b'data: {"choices": [{"delta": null}]}\n\n'), "frame"),
        (httpx.ConnectError("refused"), "baton up"),
        (httpx.ReadTimeout("slow"), "baton up"),
    ],
)
def test_what_goes_wrong_is_said(answer: httpx.Response | Exception, words: str) -> None:
    with Server(answer).client() as client, pytest.raises(ConfigError, match=words):
        list(chat.stream_text(client, {}))


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(server: Server, lines: str, *options: str) -> str:
        monkeypatch.setattr(chat, "_client", lambda _url, _key: server.client())
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["chat", *options]) == 0
        return capsys.readouterr().out

    return run


def test_a_conversation_remembers_and_forgets(talk: Any) -> None:
    server = Server(*(streamed(frame(text)) for text in ("one", "two", "three")))
    said = talk(server, "a\n\nb\n/reset\nc\n/quit\nd\n", "--system", "be brief")
    assert said.split() == ["one", "two", "three"]
    roles = [[message["content"] for message in body["messages"]] for body in server.asked]
    assert roles == [["be brief", "a"], ["be brief", "a", "one", "b"], ["be brief", "c"]]


def test_a_failed_turn_is_not_part_of_the_conversation(talk: Any) -> None:
    failure = httpx.Response(503, json={"error": {"message": "no [red]node[/bold] is alive"}})
    server = Server(failure, streamed(frame("fine")))
    assert "no [red]node[/bold] is alive" in talk(server, "a\nb\n")
    assert [message["content"] for message in server.asked[1]["messages"]] == ["b"]


def test_an_answer_cannot_steer_the_terminal(talk: Any) -> None:
    hostile = "a\x1b]0;title\x07b\x1b[2J\x9b2Jc\r\bd\ne [bold]f"
    said = talk(Server(streamed(frame(hostile))), "x\n")
    assert said == "a]0;titleb[2J2Jcd\ne [bold]f\n"


@pytest.mark.parametrize("url", ["http://[", "nonsense", "http://127.0.0.1:1"])
def test_a_server_that_is_not_there(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url]) == 2
    assert "url" in capsys.readouterr().err.lower()
