"""openai-python against real nodes: create, stream, the stream helper, raw responses, both clients, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.api.conftest import MODEL
from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(300), pytest.mark.usefixtures("nothing_left")]

ASK: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 20,
}
ANSWER = "The capital of France is Paris."


async def test_create_and_its_usage(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**ASK, extra_headers={"x-request-id": "mine-1"})
    answer = raw.parse()
    assert raw.headers["x-request-id"] == "mine-1"
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None


async def test_s4_streams_are_the_same_text(client: openai.AsyncOpenAI) -> None:
    chunks = [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_s7_the_stream_helper_with_usage(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with client.chat.completions.stream(**ASK, stream_options=options) as stream:
        events = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    assert "content.done" in events
    assert (answer.choices[0].message.content, answer.choices[0].message.role) == (ANSWER, "assistant")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8  # seven of text and EOS


def test_the_synchronous_client(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="k", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        text = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=3, temperature=0)
        assert text.choices[0].text
        parts = client.completions.create(
            model=MODEL, prompt="One, two, three,", max_tokens=3, temperature=0, stream=True
        )
        assert "".join(part.choices[0].text for part in parts) == text.choices[0].text


async def test_e_errors_have_their_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(**ASK | {"model": "other"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**ASK | {"temperature": 5})
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded") as long:
        await client.completions.create(model=MODEL, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"


async def test_q1_a_stream_that_is_left_frees_its_nodes(client: openai.AsyncOpenAI) -> None:
    """The file's last fixture sees that nothing is held; here many leave at once, after their first words."""

    async def leave() -> None:
        stream = await client.chat.completions.create(**ASK | {"max_tokens": 500, "stream": True})
        await anext(aiter(stream))
        await stream.close()

    await asyncio.gather(*(leave() for _ in range(8)))
    answer = await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == ANSWER
