"""A client that stops reading, without a network: the ASGI calls are the test's own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_generator import FakeGenerator, deltas

from cluster.request import SamplingParams
from router.answer import Answer
from router.choice import TextRules
from router.generation import Generation
from router.metrics import Metrics
from router.middleware import RECORD_KEY, RequestRecord
from router.planning import Plan
from router.tokenizer import Tokenizer


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_s10_p23_a_client_that_stops_reading(tokenizer: Tokenizer, num_prompts: int) -> None:
    generator = FakeGenerator()
    generator.script = deltas([100] * 5, "length")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    plan = Plan(
        endpoint="completions",
        generations=(Generation((1, 2), SamplingParams(max_tokens=5)),) * num_prompts,
        rules=TextRules(),
        stream=True,
        usage="none",
        return_token_ids=False,
    )
    record = RequestRecord("id", "completions", time.perf_counter())
    answer = Answer(
        plan,
        model="m",
        system_fingerprint=None,
        tokenizer=tokenizer,
        generator=generator,
        metrics=Metrics(),
        send_timeout_s=0.001,
    )
    await answer({RECORD_KEY: record}, receive, send)
    assert record.outcome == "slow_client"
    assert generator.num_open == 0
    assert not any(message.get("more_body") is False for message in sent)  # never ended as if it were whole
