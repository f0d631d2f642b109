"""Log-probabilities and echoed prompts as clients read them: every token once, every value as the nodes gave it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from front_harness import MODEL, Front

from cluster.request import LOGPROB_FLOOR, TokenLogprobs
from router.generation import TokenDelta
from router.logprobs import legacy_name

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = " Paris — 東京 👩‍👩‍👧 e\u0301\n"


def score(token_id: int, num_top: int) -> TokenLogprobs:
    """Made-up values that tell each token; it is the likeliest of every second list only."""
    chosen = -1.0 - token_id / 7
    others = tuple((token_id % 40_000 + n, -0.1 - n / 3) for n in range(1, num_top + 1))
    if token_id % 2 and num_top:
        return TokenLogprobs(-0.01 - 1 / 3, ((token_id, -0.01 - 1 / 3), *others)[:num_top])
    return TokenLogprobs(chosen, others)


def script(
    ids: Sequence[int], num_top: int, *, finish: Any = "length", per_delta: int = 1, prompt: Sequence[int] = ()
) -> list[TokenDelta]:
    """Without ``ids`` one delta without tokens, as where nothing is generated."""
    groups = [tuple(ids[start : start + per_delta]) for start in range(0, len(ids), per_delta)] or [()]
    return [
        TokenDelta(
            group,
            finish if index == len(groups) - 1 else None,
            0 if index == 0 else None,
            tuple(score(token_id, num_top) for token_id in group),
            prompt_logprobs=tuple(score(token_id, num_top) for token_id in prompt[1:]) if index == 0 else (),
        )
        for index, group in enumerate(groups)
    ]


def ids_of(front: Front, text: str) -> list[int]:
    return list(front.tokenizer._backend.encode(text, add_special_tokens=False).ids)


async def stream(front: Front, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await front.http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]


def entry(front: Front, token_id: int, logprob: float) -> dict[str, Any]:
    token = front.tokenizer.token_bytes(token_id)
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


@pytest.mark.parametrize("per_delta", [1, 3, 100])
@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_c5_q4_chat_logprobs(front: Front, num_top: int, per_delta: int) -> None:
    """Every token once, token 0 included; exactly ``top_logprobs`` alternatives; the bytes join to the text."""
    ids = ids_of(front, TEXT)
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": num_top}
    front.generator.script = script(ids, num_top, per_delta=per_delta)
    whole = (await front.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert front.generator.seen[-1].sampling.num_logprobs == num_top
    expected = [
        entry(front, token_id, chosen.chosen)
        | {"top_logprobs": [entry(front, other, logprob) for other, logprob in chosen.top]}
        for token_id, chosen in ((token_id, score(token_id, num_top)) for token_id in ids)
    ]
    assert whole["logprobs"]["content"] == expected
    assert all(len(one["top_logprobs"]) == num_top for one in expected)
    assert b"".join(bytes(one["bytes"]) for one in expected).decode() == whole["message"]["content"] == TEXT
    front.generator.script = script(ids, num_top, per_delta=per_delta)
    chunks = await stream(front, "/v1/chat/completions", body)
    assert [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]] == expected
    # Half a character makes no frame of its own (D1); its tokens come with the frame that completes it.
    assert all(chunk["delta"].get("content") or chunk["finish_reason"] for chunk in chunks[1:])


async def test_c5_without_logprobs_there_are_none(front: Front) -> None:
    front.replay(TEXT)
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        answer = (await front.http.post("/v1/chat/completions", json={"messages": HELLO} | fields)).json()
        assert answer["choices"][0]["logprobs"] is None
    assert front.generator.seen[-1].sampling.num_logprobs is None
    response = await front.http.post("/v1/chat/completions", json={"messages": HELLO, "top_logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


async def test_c5_the_stream_helper_gathers_them(front: Front) -> None:
    ids = [*ids_of(front, TEXT), 2]
    front.generator.script = script(ids, 2, finish="stop")
    async with front.client.chat.completions.stream(
        model=MODEL,
        messages=HELLO,
        logprobs=True,
        top_logprobs=2,  # type: ignore[arg-type]
    ) as running:
        async for _ in running:
            pass
        answer = await running.get_final_completion()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.logprob for one in logprobs.content] == [score(token_id, 2).chosen for token_id in ids]
    assert {len(one.top_logprobs) for one in logprobs.content} == {2}


def offsets(front: Front, ids: Sequence[int], start: int = 0) -> list[int]:
    """Characters that are complete before each token."""
    found, before = [], b""
    for token_id in ids:
        found.append(start + len(before.decode("utf-8", "ignore")))
        before += front.tokenizer.token_bytes(token_id)
    return found


def check_lists(front: Front, logprobs: dict[str, Any], ids: Sequence[int], num_top: int, num_prompt: int) -> None:
    """L4: four lists of one length; the sampled token always in its dictionary, at the very same value."""
    names = [legacy_name(front.tokenizer.token_bytes(token_id)) for token_id in ids]
    assert logprobs["tokens"] == names
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    for place, (token_id, name) in enumerate(zip(ids, names, strict=True)):
        value, top = logprobs["token_logprobs"][place], logprobs["top_logprobs"][place]
        if num_prompt and place == 0:
            assert (value, top) == (None, None)
        else:
            assert value == top[name] == score(token_id, num_top).chosen
            assert num_top <= len(top) <= num_top + 1


@pytest.mark.parametrize("per_delta", [1, 100])
@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["The — capital 東", [464, 3139, 700, 800]], ids=["text", "ids"])
async def test_l3_l4_completion_logprobs(front: Front, prompt: Any, echo: bool, num_top: int, per_delta: int) -> None:
    ids = ids_of(front, TEXT)
    asked = ids_of(front, prompt) if isinstance(prompt, str) else prompt
    shown = front.tokenizer.decode(asked)
    body = {"prompt": prompt, "logprobs": num_top, "echo": echo}
    played = script(ids, num_top, per_delta=per_delta, prompt=asked if echo else ())
    front.generator.script = played
    whole = (await front.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert front.generator.seen[-1].num_prompt_logprobs == (num_top if echo else None)
    assert front.generator.seen[-1].sampling.num_logprobs == num_top
    assert whole["text"] == (shown if echo else "") + TEXT
    check_lists(front, whole["logprobs"], [*asked, *ids] if echo else ids, num_top, len(asked) if echo else 0)
    expected = offsets(front, asked) if echo else []
    assert whole["logprobs"]["text_offset"] == expected + offsets(front, ids, len(shown))
    front.generator.script = played
    chunks = await stream(front, "/v1/completions", body)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert not echo or chunks[0]["text"] == shown
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]] == values


@pytest.mark.parametrize("stream_it", [False, True])
async def test_l3_echo_without_logprobs(front: Front, stream_it: bool) -> None:
    front.replay(" is Paris", "stop")
    body = {"prompt": ["The capital", "x"], "echo": True, "max_tokens": 3}
    if stream_it:
        texts = {0: "", 1: ""}
        for chunk in await stream(front, "/v1/completions", body):
            texts[chunk["index"]] += chunk["text"]
            assert chunk["logprobs"] is None
    else:
        answer = (await front.http.post("/v1/completions", json=body)).json()
        texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        assert answer["usage"]["completion_tokens"] == 2 * 3
    assert texts == {0: "The capital is Paris", 1: "x is Paris"}
    assert [seen.num_prompt_logprobs for seen in front.generator.seen] == [None, None]


@pytest.mark.parametrize("stream_it", [False, True])
async def test_f11_scoring_generates_nothing(front: Front, stream_it: bool) -> None:
    asked = [464, 3139, 282]
    front.generator.script = script([], 1, prompt=asked)
    body = {"prompt": asked, "echo": True, "logprobs": 1, "max_tokens": 0}
    if stream_it:
        options = {"stream_options": {"include_usage": True}}
        choices = await stream(front, "/v1/completions", body | options)
        assert [choice["finish_reason"] for choice in choices] == [None, "length"]
        choice = choices[0]
    else:
        answer = (await front.http.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["total_tokens"] == 3
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
    assert choice["text"] == front.tokenizer.decode(asked)
    check_lists(front, choice["logprobs"], asked, 1, len(asked))
    assert front.generator.seen[0].sampling.prefill_only


async def test_lm_eval_reads_its_continuation(front: Front) -> None:
    """Its request, and its way of reading: the continuation's values, and greedy where each is its list's greatest."""
    asked = [[1, 3, 5, 8], [9, 11]]
    front.generator.script_of = {prompt[0]: script([6], 1, prompt=prompt) for prompt in asked}
    body = {"prompt": asked, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    answer = (await front.http.post("/v1/completions", json=body)).json()
    found = []
    for choice, prompt in zip(sorted(answer["choices"], key=lambda one: one["index"]), asked, strict=True):
        values = choice["logprobs"]["token_logprobs"][1:-1]
        tops = choice["logprobs"]["top_logprobs"][1:-1]
        assert values == [score(token_id, 1).chosen for token_id in prompt[1:]]
        found.append([value == max(top.values()) for value, top in zip(values, tops, strict=True)])
    assert found == [[True, True, False], [True]]


async def test_f1_the_floor_is_a_number(front: Front) -> None:
    front.generator.script = [TokenDelta((5,), "length", 0, (TokenLogprobs(LOGPROB_FLOOR, ((6, 0.0),)),))]
    response = await front.http.post("/v1/completions", json={"prompt": "x", "logprobs": 1})
    assert "Infinity" not in response.text
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [LOGPROB_FLOOR]


async def test_f13_the_stop_token_has_its_entry(front: Front) -> None:
    """It counts as a token and shows no text; its entry has a name all the same (F8: entries == completion tokens)."""
    ids = [*ids_of(front, " Paris"), 2]
    for path, prompt in (
        ("/v1/completions", {"prompt": "x", "logprobs": 0}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True}),
    ):
        front.generator.script = script(ids, 0, finish="stop")
        answer = (await front.http.post(path, json=prompt)).json()
        logprobs = answer["choices"][0]["logprobs"]
        names = logprobs["tokens"] if "tokens" in logprobs else [one["token"] for one in logprobs["content"]]
        assert names == [" Paris", "<|im_end|>"]
        assert len(names) == answer["usage"]["completion_tokens"]


async def test_e6_entries_end_with_the_stop_string(front: Front) -> None:
    ids = ids_of(front, "One two three four")
    for per_delta in (1, 4):
        front.generator.script = script(ids, 0, per_delta=per_delta)
        body = {"prompt": "x", "logprobs": 0, "stop": " three"}
        answer = (await front.http.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == "One two"
        assert answer["choices"][0]["logprobs"]["tokens"] == ["One", " two", " three"]
        front.generator.script = script(ids, 0, per_delta=per_delta)
        chunks = await stream(front, "/v1/completions", body)
        assert [name for chunk in chunks if chunk["logprobs"] for name in chunk["logprobs"]["tokens"]] == [
            "One",
            " two",
            " three",
        ]


async def test_p2_too_many_values_are_refused_before_any_work(front: Front) -> None:
    body = {"prompt": [[5] * 400] * 128, "echo": True, "logprobs": 20, "max_tokens": 0}
    response = await front.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    assert front.generator.seen == []


async def test_incomplete_prompt_logprobs_are_an_error(front: Front) -> None:
    front.generator.script = script([5], 0, prompt=[1, 2])
    response = await front.http.post("/v1/completions", json={"prompt": [1, 2, 3], "echo": True, "logprobs": 0})
    assert response.status_code == 500


async def test_a_long_echo_lets_others_be_served(front: Front) -> None:
    """Writing many entries happens off the event loop: a request that comes meanwhile is not held up."""
    asked = [5 + n % 3000 for n in range(500)]
    bodies = [asked] * 40
    front.generator.script_of = {5: script([], 20, prompt=asked)}
    body = {"prompt": bodies, "echo": True, "logprobs": 20, "max_tokens": 0}
    big = asyncio.create_task(front.http.post("/v1/completions", json=body))
    await front.generator.opened.wait()
    assert (await front.http.get("/health")).status_code == 200
    answer = (await big).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [500] * 40
