"""What tests of the served front hold: the front itself, and metrics that can be waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
import openai
from fake_generator import FakeGenerator, deltas
from fastapi import FastAPI

from router.metrics import Endpoint, Metrics, Outcome
from router.tokenizer import Tokenizer

MODEL = "m135"
CONTEXT = 512


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
