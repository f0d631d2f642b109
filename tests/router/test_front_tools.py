"""Tools over HTTP: what the model is told, and its calls in whole answers, in streams and through openai's helper."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from front_harness import MODEL, Front

from cluster.request import TokenLogprobs
from router.chat_template import ChatTemplate
from router.generation import TokenDelta
from router.tool_formats import HERMES, LLAMA3_JSON

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Look out.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
BODY: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [WEATHER, NOW]}
ZURICH = '{"city": "Zürich 👩‍👩‍👧"}'
CALL, NOW_CALL = HERMES.call("get_weather", ZURICH), HERMES.call("now", "{}")
NAMED = {"type": "function", "function": {"name": "now"}}
CUT, BEGUN = CALL.partition("ürich")[0], ZURICH.partition("ürich")[0]


def prompt(front: Front) -> str:
    return front.tokenizer.decode(front.generator.seen[-1].prompt_token_ids, show_special=True)


async def whole(front: Front, **fields: Any) -> dict[str, Any]:
    response = await front.http.post(CHAT, json=BODY | fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def streamed(front: Front, **fields: Any) -> list[dict[str, Any]]:
    response = await front.http.post(CHAT, json=BODY | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def gathered(frames: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream: the choice that a whole answer would have, without the calls' ids."""
    message: dict[str, Any] = {"role": None, "content": None}
    finish = []
    for choice in (choice for frame in frames for choice in frame["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            calls, function = message.setdefault("tool_calls", []), call["function"]
            if call["index"] == len(calls):
                assert call["id"]
                calls.append({"type": call["type"], "function": function})
                assert set(function) == {"name", "arguments"}
            else:  # more of the last arguments, and nothing else that clients would put together
                assert (call["index"], set(call), set(function)) == (
                    len(calls) - 1,
                    {"index", "function"},
                    {"arguments"},
                )
                assert function["arguments"]
                calls[-1]["function"]["arguments"] += function["arguments"]
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(finish) == 1
    return {"message": message, "finish_reason": finish[0]}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "id"} for call in message["tool_calls"]
        ]
    return {"message": message, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize("per_delta", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "finish", "fields", "content", "calls", "reason"),
    [
        (CALL, "stop", {}, None, [("get_weather", ZURICH)], "tool_calls"),
        (f"{CALL}\n{NOW_CALL}", "stop", {}, None, [("get_weather", ZURICH), ("now", "{}")], "tool_calls"),
        (f"Élan.\n{CALL}", "stop", {}, "Élan.\n", [("get_weather", ZURICH)], "tool_calls"),
        (CALL, "length", {}, None, [("get_weather", ZURICH)], "length"),
        (CALL[:40], "length", {}, CALL[:40], [], "length"),
        (CALL[:40], "stop", {}, CALL[:40], [], "stop"),
        ("No <tool_call> here", "stop", {}, "No <tool_call> here", [], "stop"),
        ("Sunny.", "stop", {}, "Sunny.", [], "stop"),
        (CALL, "stop", {"tool_choice": "none"}, CALL, [], "stop"),
        (CALL, "stop", {"tools": None}, CALL, [], "stop"),
        (CALL, "stop", {"tool_choice": "required"}, None, [("get_weather", ZURICH)], "tool_calls"),
        (NOW_CALL, "stop", {"tool_choice": NAMED}, None, [("now", "{}")], "stop"),
        (CALL + NOW_CALL, "stop", {"parallel_tool_calls": False}, NOW_CALL, [("get_weather", ZURICH)], "tool_calls"),
        # D15: a stop string in a call, before its arguments and in them, after it, and in its end.
        (f"Hi {CALL}", "stop", {"stop": "arguments"}, "Hi " + CALL.partition("arguments")[0], [], "stop"),
        (f"Hi {CALL}", "stop", {"stop": "city"}, "Hi ", [("get_weather", '{"')], "stop"),
        (CALL, "stop", {"stop": "}}"}, None, [("get_weather", ZURICH[:-1])], "stop"),
        (
            CALL,
            "stop",
            {"stop": "}}", "include_stop_str_in_output": True},
            None,
            [("get_weather", ZURICH)],
            "tool_calls",
        ),
        # Cut by max_tokens, or ended by the model, amid the arguments.
        (CUT, "length", {}, None, [("get_weather", BEGUN)], "length"),
        (CUT, "stop", {}, None, [("get_weather", BEGUN)], "stop"),
        (f"{NOW_CALL}{CUT}", "stop", {}, None, [("now", "{}"), ("get_weather", BEGUN)], "stop"),
        (CALL, "stop", {"stop": "</tool_call>"}, None, [("get_weather", ZURICH)], "tool_calls"),
        (CALL, "stop", {"stop": "call>\n{", "include_stop_str_in_output": True}, "<tool_call>\n{", [], "stop"),
        # An answer of a form that was asked for is no call.
        (CALL, "stop", {"guided_regex": "(?s:.*)"}, CALL, [], "stop"),
    ],
)
async def test_whole_and_streamed(
    front: Front, text: str, finish: str, fields: Any, content: Any, calls: Any, reason: str, per_delta: int
) -> None:
    token_ids = front.replay(text, finish, per_delta=per_delta)
    answer = await whole(front, **fields)
    assert answer["message"]["content"] == content
    found = [
        (call["function"]["name"], call["function"]["arguments"]) for call in answer["message"].get("tool_calls", [])
    ]
    assert (found, answer["finish_reason"]) == (calls, reason)
    frames = await streamed(front, **fields, return_token_ids=True)
    assert gathered(frames) == without_ids(answer)
    shown = [token_id for frame in frames for choice in frame["choices"] for token_id in choice.get("token_ids", [])]
    assert shown == list(token_ids[: len(shown)])
    assert len(shown) == len(token_ids) or "stop" in fields


async def test_arguments_stream_as_they_are_generated(front: Front) -> None:
    """The name before them, each token's part of them with that token, and nothing of the notation."""
    front.replay(CALL, "stop")
    frames = await streamed(front)
    parts = [call for frame in frames for call in frame["choices"][0]["delta"].get("tool_calls", [])]
    assert len(parts) > 5
    first = parts[0]
    assert (first["type"], first["function"]["name"]) == ("function", "get_weather")
    assert ZURICH.startswith(first["function"]["arguments"])
    assert len(first["function"]["arguments"]) < 4
    assert "".join(part["function"]["arguments"] for part in parts) == ZURICH


async def test_ids_of_calls_are_unique_and_the_stream_has_one_for_each(front: Front) -> None:
    front.replay(f"{CALL}\n{NOW_CALL}", "stop")
    ids = [call["id"] for _ in range(2) for call in (await whole(front))["message"]["tool_calls"]]
    frames = await streamed(front)
    calls = [call for frame in frames for call in frame["choices"][0]["delta"].get("tool_calls", []) if "id" in call]
    assert [(call["index"], call["type"]) for call in calls] == [(0, "function"), (1, "function")]
    ids += [call["id"] for call in calls]
    assert len(set(ids)) == 6
    assert all(one.startswith("call_") and len(one) <= 40 for one in ids)


async def test_text_before_a_call_does_not_wait_for_it(front: Front) -> None:
    front.replay(f"Look: {CALL}", "stop")
    contents = [frame["choices"][0]["delta"].get("content") for frame in await streamed(front)]
    assert contents[:3] == [None, "Look", ":"]


async def test_choices_are_read_apart(front: Front) -> None:
    texts = [CALL, "Sunny.", f"{NOW_CALL}\n{CALL}"]
    scripts = []
    for number, text in enumerate(texts):
        front.replay(text, "stop")
        scripts.append(
            [TokenDelta(d.token_ids, d.finish_reason, d.cached_tokens, choice=number) for d in front.generator.script]
        )  # type: ignore[union-attr]
    front.generator.script = [step for steps in itertools.zip_longest(*scripts) for step in steps if step is not None]
    answers = (await front.http.post(CHAT, json=BODY | {"n": 3})).json()["choices"]
    assert [answer["finish_reason"] for answer in answers] == ["tool_calls", "stop", "tool_calls"]
    assert [len(answer["message"].get("tool_calls", [])) for answer in answers] == [1, 0, 2]
    frames = await streamed(front, n=3)
    for index, answer in enumerate(answers):
        assert gathered(frames, index) == without_ids(answer)
    ids = [call["id"] for answer in answers for call in answer["message"].get("tool_calls", [])]
    assert len(set(ids)) == 3


async def test_every_token_keeps_its_log_probability_and_is_counted(front: Front) -> None:
    token_ids = front.replay(CALL, "stop")
    scores = [TokenLogprobs(-0.5 - number, ()) for number in range(len(token_ids))]
    front.generator.script = [
        TokenDelta((token_id,), "stop" if number == len(scores) - 1 else None, 0, (scores[number],))
        for number, token_id in enumerate(token_ids)
    ]
    answer = await whole(front, logprobs=True)
    values = [entry["logprob"] for entry in answer["logprobs"]["content"]]
    assert values == [score.chosen for score in scores]
    frames = await streamed(front, logprobs=True, stream_options={"include_usage": True})
    parts = [choice["logprobs"] for frame in frames for choice in frame["choices"] if choice["logprobs"]]
    assert [entry["logprob"] for part in parts for entry in part["content"]] == values
    assert frames[-1]["usage"]["completion_tokens"] == len(token_ids)


@pytest.mark.parametrize("per_delta", [1, 1000])
async def test_openai_and_its_stream_helper(front: Front, per_delta: int) -> None:
    front.replay(f"Look: {CALL}\n{NOW_CALL}", "stop", per_delta=per_delta)
    answer = (await front.client.chat.completions.create(**BODY)).choices[0]
    assert answer.message.tool_calls is not None
    async with front.client.chat.completions.stream(**BODY) as stream:
        events = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert events.count("tool_calls.function.arguments.done") == 2
    assert final.finish_reason == answer.finish_reason == "tool_calls"
    assert final.message.content == answer.message.content == "Look: "
    for one in (answer, final):
        assert one.message.tool_calls is not None
        functions = [call.function for call in one.message.tool_calls if call.type == "function"]
        assert [(function.name, function.arguments) for function in functions] == [
            ("get_weather", ZURICH),
            ("now", "{}"),
        ]
    # And back again, as the next turn of the conversation.
    turns = [*ASK, answer.message, {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "rain"}]
    front.replay("Rain.", "stop")
    await front.client.chat.completions.create(**BODY | {"messages": turns})
    assert f"assistant\nLook: \n{CALL}\n{NOW_CALL}<|im_end|>" in prompt(front)
    assert "user\n<tool_response>\nrain\n</tool_response><|im_end|>" in prompt(front)


async def test_a_template_without_tools_is_given_instructions(front: Front) -> None:
    front.replay("x")
    await whole(front, messages=[{"role": "system", "content": "Be brief."}, *ASK])
    system = prompt(front).partition("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(WEATHER) in system
    described = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    assert json.dumps({"type": "function", "function": described}) in system
    await whole(front)
    assert prompt(front).startswith("<|im_start|>system\n# Tools")
    with_tools = front.generator.seen[-1].prompt_token_ids
    counted = await front.http.post("/tokenize", json={"messages": ASK, "tools": BODY["tools"]})
    assert tuple(counted.json()["tokens"]) == with_tools
    await whole(front, tool_choice="none")
    assert "Tools" not in prompt(front)


@pytest.mark.parametrize(
    ("fields", "single", "functions"),
    [
        ({"tool_choice": "required"}, False, ["get_weather", "now"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True, ["get_weather", "now"]),
        ({"tool_choice": NAMED}, True, ["now"]),
    ],
)
async def test_forced_calls_have_a_grammar(front: Front, fields: Any, single: bool, functions: list[str]) -> None:
    front.replay(NOW_CALL, "stop")
    await whole(front, **fields)
    grammar = front.generator.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert (" call)*" in grammar.text) != single
    assert [name for name in ("get_weather", "now") if f'\\"{name}\\"' in grammar.text] == functions


async def test_free_calls_have_none(front: Front) -> None:
    front.replay(NOW_CALL, "stop")
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": None, "parallel_tool_calls": None}):
        await whole(front, **fields)
        assert front.generator.seen[-1].sampling.grammar is None


async def test_llama_writes_its_calls_bare(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its template says so; the tools are given to it."""
    source = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}{{ c.function.arguments | tojson }}}'
        "{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(front.tokenizer, "_chat_template", ChatTemplate(source, {}))
    assert front.tokenizer.tool_format() == LLAMA3_JSON
    planner = next(
        route.endpoint.__self__._planner  # type: ignore[attr-defined]
        for route in front.app.routes
        if route.path == CHAT  # type: ignore[attr-defined]
    )
    monkeypatch.setattr(planner, "_tool_format", LLAMA3_JSON)
    bare = LLAMA3_JSON.call("get_weather", ZURICH)
    front.replay(f"{bare}; {LLAMA3_JSON.call('now', '{}')}", "stop")
    answer = await whole(front)
    assert prompt(front).startswith(json.dumps(WEATHER))
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["get_weather", "now"]
    assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    assert gathered(await streamed(front)) == without_ids(answer)
    history = [*ASK, {"role": "assistant", "tool_calls": answer["message"]["tool_calls"]}]
    await whole(front, messages=history)
    assert bare in prompt(front)
