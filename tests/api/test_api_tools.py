"""Tools against real nodes: forced calls follow their schemas across the handoff, whole and streamed, and free ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.api.conftest import MODEL, gather_posts
from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(300), pytest.mark.usefixtures("nothing_left")]

CHAT = "/v1/chat/completions"
CITIES = ["Paris", "Rome", "Zürich"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "description": "The time of day."}},
]
ASK: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "How is the weather in Rome for three days, in Celsius?"}],
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 120,
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def check(name: str, arguments: str) -> None:
    """Whether a call is one of those that were offered."""
    found = json.loads(arguments)
    if name == "get_time":
        assert found == {}
        return
    assert name == "get_weather"
    assert list(found) == ["city", "days", "units"]
    assert found["city"] in CITIES
    assert type(found["days"]) is int
    assert 1 <= found["days"] <= 9
    assert 1 <= len(found["units"]) <= 2
    assert set(found["units"]) <= {"C", "F"}


def assembled(parts: list[Any]) -> list[tuple[str, str]]:
    """The calls that a stream's parts make: the name once, the arguments piece by piece."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.index == len(found):
            assert part.id
            found.append((part.function.name, part.function.arguments))
        else:
            assert (part.index, part.id, part.function.name) == (len(found) - 1, None, None)
            found[-1] = (found[-1][0], found[-1][1] + part.function.arguments)
    return found


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls"),
        ({"tool_choice": NAMED}, "stop"),
    ],
)
async def test_c7_forced_calls_whole_and_streamed(
    stack: Stack, client: openai.AsyncOpenAI, fields: Any, reason: str, seed: int | None
) -> None:
    sampled = {} if seed is None else {"temperature": 1.5, "seed": seed, "n": 3}
    body = ASK | fields | sampled | {"return_token_ids": True}
    (whole,) = await gather_posts(stack, CHAT, [body])
    for choice in whole["choices"]:
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, reason)
        (call,) = choice["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
        if "n" not in sampled and fields["tool_choice"] == NAMED:
            assert call["function"]["name"] == "get_weather"
    extra = {"return_token_ids": True}
    stream = await client.chat.completions.create(**ASK | fields | sampled, stream=True, extra_body=extra)
    token_ids: dict[int, list[int]] = {}
    calls: dict[int, list[Any]] = {}
    async for chunk in stream:
        for part in chunk.choices:
            token_ids.setdefault(part.index, []).extend(getattr(part, "token_ids", None) or [])
            calls.setdefault(part.index, []).extend(part.delta.tool_calls or [])
            assert not part.delta.content
    for choice in whole["choices"]:
        index = choice["index"]
        assert token_ids[index] == choice["token_ids"]
        functions = [
            (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
        ]
        assert assembled(calls[index]) == functions
        assert len(calls[index]) > len(functions)


async def test_several_calls_by_the_stream_helper(client: openai.AsyncOpenAI) -> None:
    body = ASK | {"tool_choice": "required", "temperature": 1.0, "seed": 11}
    whole = (await client.chat.completions.create(**body)).choices[0]
    async with client.chat.completions.stream(**body) as stream:
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == whole.finish_reason
    assert final.message.content == whole.message.content
    functions = [
        [
            (call.function.name, call.function.arguments)
            for call in one.message.tool_calls or []
            if call.type == "function"
        ]
        for one in (whole, final)
    ]
    assert functions[0] == functions[1]
    assert functions[0]
    for name, arguments in functions[0]:
        check(name, arguments)


async def test_d15_a_forced_call_that_is_cut(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """Before its arguments it is text, after that a call with what there is of them; in a stream alike."""
    body = ASK | {"tool_choice": NAMED}
    cut = [body | {"max_tokens": count} for count in (1, 2, 12, 24)] + [body | {"stop": "days"}]
    answers = await gather_posts(stack, CHAT, [body, *cut])
    (call,) = answers[0]["choices"][0]["message"]["tool_calls"]
    arguments = call["function"]["arguments"]
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    for fields, answer in zip(cut, answers[1:], strict=True):
        message = answer["choices"][0]["message"]
        if "tool_calls" in message:
            (call,) = message["tool_calls"]
            assert (message["content"], call["function"]["name"]) == (None, "get_weather")
            assert arguments.startswith(call["function"]["arguments"])
            assert call["function"]["arguments"] != arguments
        else:
            assert message["content"]
            assert text.partition(arguments)[0].startswith(message["content"])
        chunks = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**fields, stream=True)]
        assert "".join(chunk.content or "" for chunk in chunks) == (message["content"] or "")
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert assembled([part for chunk in chunks for part in chunk.tool_calls or []]) == found
    assert [answer["choices"][0]["finish_reason"] for answer in answers[1:]] == ["length"] * 4 + ["stop"]
    assert "tool_calls" not in answers[1]["choices"][0]["message"]
    (call,) = answers[-1]["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments.partition("days")[0]


async def test_free_calls_and_a_second_turn(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """Whatever a small model makes of tools: stream and whole agree, and its calls go back as history."""
    bodies = [ASK | {"seed": seed, "temperature": 0.8, "max_tokens": 40} for seed in range(2)]
    wholes = await asyncio.gather(*(client.chat.completions.create(**body) for body in bodies))
    for body, whole in zip(bodies, wholes, strict=True):
        parts = [chunk.choices[0] async for chunk in await client.chat.completions.create(**body, stream=True)]
        assert "".join(part.delta.content or "" for part in parts) == (whole.choices[0].message.content or "")
        assert parts[-1].finish_reason == whole.choices[0].finish_reason
        assert assembled([call for part in parts for call in part.delta.tool_calls or []]) == [
            (call.function.name, call.function.arguments)
            for call in whole.choices[0].message.tool_calls or []
            if call.type == "function"
        ]
    forced = (await client.chat.completions.create(**ASK | {"tool_choice": NAMED})).choices[0].message
    assert forced.tool_calls is not None
    result = {"role": "tool", "tool_call_id": forced.tool_calls[0].id, "content": "Sunny, 20 C"}
    turns = [*ASK["messages"], forced, result]
    answer = await client.chat.completions.create(**ASK | {"messages": turns, "tool_choice": "none", "max_tokens": 20})
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
    counted = await gather_posts(stack, "/tokenize", [{"messages": ASK["messages"], "tools": TOOLS}])
    assert answer.usage is not None
    assert wholes[0].usage is not None
    assert wholes[0].usage.prompt_tokens == counted[0]["count"]
