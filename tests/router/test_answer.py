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


def answer_of(
    tokenizer: Tokenizer, generator: FakeGenerator, num_prompts: int = 1, send_timeout_s: float = 30.0
) -> Answer:
    plan = Plan(
        endpoint="completions",
        generations=(Generation((1, 2), SamplingParams(max_tokens=5)),) * num_prompts,
        rules=TextRules(),
        stream=True,
        usage="none",
        return_token_ids=False,
    )
    return Answer(
        plan,
        model="m",
        system_fingerprint=None,
        tokenizer=tokenizer,
        generator=generator,
        metrics=Metrics(),
        send_timeout_s=send_timeout_s,
    )


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

    record = RequestRecord("id", "completions", time.perf_counter())
    answer = answer_of(tokenizer, generator, num_prompts, send_timeout_s=0.001)
    await answer({RECORD_KEY: record}, receive, send)
    assert record.outcome == "slow_client"
    assert generator.num_open == 0
    assert not any(message.get("more_body") is False for message in sent)  # never ended as if it were whole


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_client_that_leaves_while_a_frame_waits_for_it(tokenizer: Tokenizer, num_prompts: int) -> None:
    generator, sending = FakeGenerator(), asyncio.Event()
    generator.script = deltas([100] * 5, "length")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        await sending.wait()
        return {"type": "http.disconnect"}

    record = RequestRecord("id", "completions", time.perf_counter())
    await answer_of(tokenizer, generator, num_prompts)({RECORD_KEY: record}, receive, send)
    assert record.outcome == "cancelled"
    assert generator.num_open == 0


async def test_the_end_of_an_answer_is_no_disconnect(tokenizer: Tokenizer) -> None:
    generator, ended = FakeGenerator(), asyncio.Event()
    generator.script = deltas([100] * 5, "length")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            ended.set()

    async def receive() -> Any:
        await ended.wait()
        return {"type": "http.disconnect"}

    record = RequestRecord("id", "completions", time.perf_counter())
    await answer_of(tokenizer, generator)({RECORD_KEY: record}, receive, send)
    assert ended.is_set()
    assert record.outcome is None
    assert generator.num_open == 0


async def test_who_answers_is_cancelled_with_all_it_runs(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator()
    generator.script = [asyncio.Event()]

    async def send(_message: Any) -> None:
        raise AssertionError("there is nothing to send")

    async def receive() -> Any:
        await asyncio.Event().wait()

    record = RequestRecord("id", "completions", time.perf_counter())
    answering = asyncio.create_task(answer_of(tokenizer, generator, 2)({RECORD_KEY: record}, receive, send))
    await generator.opened.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert generator.num_open == 0
