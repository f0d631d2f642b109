"""`baton chat`: a conversation in the terminal with any OpenAI-style endpoint."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from rich.console import Console

from cluster.config import ENV_API_KEY, ConfigError, api_key

if TYPE_CHECKING:
    from cli.model import Subparsers

# A model may say anything; what steers a terminal is not shown.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HELP = "/reset starts a new conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def add_parser(commands: Subparsers) -> None:
    """Add `baton chat`."""
    parser = commands.add_parser(
        "chat",
        help="talk to a running deployment",
        description=f"A conversation in the terminal. {HELP} An API key comes from ${ENV_API_KEY}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL that `baton up` printed")
    parser.add_argument("--model", help="default: the first model the server lists")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read lines from stdin, stream answers to stdout."""
    console = Console(highlight=False)
    with _client(args.url, api_key()) as client:
        model = args.model or _first_model(client)
        start: list[dict[str, str]] = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(start)
        if sys.stdin.isatty():
            console.print(f"{_shown(model)}  {HELP}", markup=False)
        for line in _lines(console):
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            body = {
                "model": model,
                "messages": messages,
                "temperature": args.temperature,
                "max_tokens": args.max_tokens,
                "stream": True,
            }
            if answer := _answer(client, body, console):
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()  # nothing was said: ask again without this line
    return 0


def _client(url: str, key: bytes | None) -> httpx.Client:
    headers = {} if key is None else {b"authorization": b"Bearer " + key}
    timeout = httpx.Timeout(60, connect=5)
    try:
        return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout, trust_env=False)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url is not a URL: {error}") from error


def _shown(text: str) -> str:
    return _CONTROLS.sub("", text)


def _lines(console: Console) -> Iterator[str]:
    while True:
        try:
            line = console.input("[bold cyan]> [/bold cyan]") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _answer(client: httpx.Client, body: dict[str, Any], console: Console) -> str:
    """Stream one answer; what came before Ctrl-C or an error counts as said."""
    said: list[str] = []
    try:
        for text in stream_text(client, body):
            said.append(text)
            console.print(_shown(text), end="", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    except ConfigError as error:
        console.print(_shown(str(error)), end="", style="red", markup=False)
    console.print()
    return "".join(said)


def stream_text(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """Pieces of the answer. Raises :class:`ConfigError` with the server's own message if it refuses or fails."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ConfigError(_message(response.content))
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _texts(line[len("data: ") :])
    except httpx.HTTPError as error:
        raise ConfigError(f"no answer from {client.base_url}: {error}; is `baton up` running?") from error


def _texts(frame: str) -> Iterator[str]:
    try:
        decoded = msgspec.json.decode(frame)
        if "error" in decoded:
            raise ConfigError(str(decoded["error"]["message"]))
        for choice in decoded["choices"]:
            if text := choice["delta"].get("content"):
                yield str(text)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("the server sent a frame that is not OpenAI's") from error


def _first_model(client: httpx.Client) -> str:
    try:
        return str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"no Baton at {client.base_url} ({error}); start one with `baton up`, or pass --url"
        ) from error


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "the server refused the request"
