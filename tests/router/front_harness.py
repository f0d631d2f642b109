"""What tests of the served front hold: the front itself, and metrics that can be waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fake_generator import FakeGenerator, deltas
from fastapi import FastAPI

from router.metrics import Endpoint, Metrics, Outcome
from router.tokenizer import Tokenizer

MODEL = "m135"
CONTEXT = 512
SECRET = "xyzzy"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": SECRET}]


@dataclass(frozen=True, slots=True)
class Front:
    """A served front, clients for it and what stands behind it."""

    url: str
    generator: FakeGenerator
    tokenizer: Tokenizer
    metrics: WatchedMetrics
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    app: FastAPI

    def replay(self, text: str, finish: str = "length", **options: int) -> tuple[int, ...]:
        """Let every generation answer ``text``; returns its token ids (with EOS where it stops)."""
        token_ids = tuple(self.tokenizer._backend.encode(text, add_special_tokens=False).ids)
        if finish == "stop":
            token_ids += self.tokenizer.eos_token_ids[:1]
        self.generator.script = deltas(token_ids, finish, **options)  # type: ignore[arg-type]
        return token_ids


class WatchedMetrics(Metrics):
    """Lets a test wait for the end of a request that nobody answers."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def ended(self, endpoint: Endpoint, outcome: Outcome) -> None:
        super().ended(endpoint, outcome)
        self._changed.set()

    def count(self, endpoint: Endpoint, outcome: Outcome) -> int:
        labels = {"endpoint": endpoint, "outcome": outcome}
        return int(self.registry.get_sample_value("baton_router_requests_total", labels) or 0)

    async def reaches(self, endpoint: Endpoint, outcome: Outcome, count: int) -> None:
        """Wait until this many requests have ended so."""
        async with asyncio.timeout(30):
            while self.count(endpoint, outcome) < count:
                self._changed.clear()
                await self._changed.wait()


async def check_refusal(front: Front, response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """One refusal's shape, and that the server is as well as before."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["code"], str)
    if code is not None:
        assert error["code"] == code
    assert SECRET not in response.text
    assert "/" not in error["message"].replace("/v1/", "").replace("application/json", "")
    assert response.headers["x-request-id"]
    assert (await front.http.get("/health")).status_code == 200
    assert front.generator.seen == []
    front.replay("ok")
    assert (await front.http.post(COMPLETIONS, json={"prompt": "x"})).json()["choices"][0]["text"] == "ok"
    return error
