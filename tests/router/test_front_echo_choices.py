"""Echo, log-probabilities, several choices and several prompts at once: each choice is what it would be alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

import pytest
from front_harness import Front
from msgspec.structs import replace
from test_front import frames
from test_front_logprobs import check_lists, ids_of, offsets, score, script

from router.generation import TokenDelta

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS = "/v1/completions"
PROMPTS = ["The — capital 東", "x"]
TEXTS = [[" Paris 👩‍👩‍👧", " e\u0301"], [" 東京 is", " one two three"]]


def play(front: Front, num_top: int, *, n: int = 2, scored: bool, limit: int | None = None) -> list[list[int]]:
    """Every prompt's choices take turns; the first one brings the prompt's. Returns each choice's ids, by index."""
    found: list[list[int]] = []
    for prompt, texts in zip(PROMPTS, TEXTS, strict=True):
        asked, scripts = ids_of(front, prompt), []
        for number, text in enumerate(texts[:n]):
            ids = ids_of(front, text)[:limit]
            deltas = script(ids, num_top, prompt=asked if scored and number == 0 else ())
            if number:
                deltas[0] = replace(deltas[0], cached_tokens=None)
            scripts.append([replace(delta, choice=number) for delta in deltas])
            found.append(ids)
        turns = chain.from_iterable(zip_longest(*scripts))
        front.generator.script_of[asked[0]] = [delta for delta in turns if delta is not None]
    return found


def joined(frames_of: Sequence[dict[str, Any]], with_logprobs: bool) -> list[dict[str, Any]]:
    """The choices of a stream put together, by index."""
    chunks = [choice for frame in frames_of for choice in frame["choices"]]
    found = []
    for index in sorted({chunk["index"] for chunk in chunks}):
        theirs = [chunk for chunk in chunks if chunk["index"] == index]
        assert [chunk["finish_reason"] for chunk in theirs[:-1]] == [None] * (len(theirs) - 1)
        whole = {"index": index, "text": "".join(chunk["text"] for chunk in theirs), "logprobs": None}
        if with_logprobs:
            given = [chunk["logprobs"] for chunk in theirs if chunk["logprobs"]]
            whole["logprobs"] = {name: [value for one in given for value in one[name]] for name in given[0]}
        found.append(whole | {"finish_reason": theirs[-1]["finish_reason"]})
    return found


async def answers(front: Front, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices and usage, asked for as the body says."""
    if body["stream"]:
        seen = await frames(front, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        return joined(seen, body.get("logprobs") is not None), seen[-1]["usage"]
    answer = (await front.http.post(COMPLETIONS, json=body)).json()
    return answer["choices"], answer["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("echo", [False, True])
async def test_choice_j_of_prompt_i(front: Front, echo: bool, logprobs: int | None, stream: bool) -> None:
    """Index i * n + j, the prompt's own text and values first in each; computed once, counted once."""
    ids = play(front, logprobs or 0, scored=echo and logprobs is not None)
    if logprobs is None:
        for prompt, steps in front.generator.script_of.items():
            front.generator.script_of[prompt] = [
                replace(step, logprobs=()) for step in steps if isinstance(step, TokenDelta)
            ]
    body = {"prompt": PROMPTS, "n": 2, "echo": echo, "stream": stream}
    choices, usage = await answers(front, body if logprobs is None else body | {"logprobs": logprobs})
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for index, choice in enumerate(choices):
        prompt, text = PROMPTS[index // 2], TEXTS[index // 2][index % 2]
        asked = ids_of(front, prompt) if echo else []
        assert choice["text"] == (prompt if echo else "") + text
        assert choice["finish_reason"] == "length"
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            check_lists(front, choice["logprobs"], [*asked, *ids[index]], logprobs, len(asked))
            expected = offsets(front, asked) + offsets(front, ids[index], len(prompt))
            assert choice["logprobs"]["text_offset"] == expected
    assert usage["prompt_tokens"] == sum(len(ids_of(front, prompt)) for prompt in PROMPTS)
    assert usage["completion_tokens"] == sum(map(len, ids))
    assert [seen.sampling.num_choices for seen in front.generator.seen] == [2, 2]
    assert {seen.num_prompt_logprobs for seen in front.generator.seen} == {logprobs if echo else None}


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_with_n_shows_the_prompt_n_times(front: Front, stream: bool) -> None:
    play(front, 1, scored=True, limit=0)
    body = {"prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    choices, usage = await answers(front, body)
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        (PROMPTS[index // 2], "length") for index in range(4)
    ]
    for index, choice in enumerate(choices):
        asked = ids_of(front, PROMPTS[index // 2])
        check_lists(front, choice["logprobs"], asked, 1, len(asked))
    assert usage["completion_tokens"] == 0


async def test_an_echo_is_the_first_of_every_choice_before_any_of_them_goes_on(front: Front) -> None:
    play(front, 0, scored=True)
    body = {"prompt": PROMPTS[0], "n": 2, "echo": True, "logprobs": 0, "return_token_ids": True}
    seen = [frame["choices"][0] for frame in await frames(front, COMPLETIONS, body)]
    assert [(chunk["index"], "prompt_token_ids" in chunk) for chunk in seen[:2]] == [(0, True), (1, True)]
    assert [(chunk["index"], chunk["text"], chunk["token_ids"]) for chunk in seen[2:4]] == [
        (0, PROMPTS[0], []),
        (1, PROMPTS[0], []),
    ]
    assert all(chunk["token_ids"] for chunk in seen[4:])


async def test_a_stop_string_ends_its_choice_after_the_echo(front: Front) -> None:
    """A stop string in the prompt does not end anything; in one choice it ends that one only."""
    play(front, 0, scored=True)
    for stream in (False, True):
        body = {"prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 0, "stop": ["two", "capital"], "stream": stream}
        choices, _ = await answers(front, body)
        texts = [PROMPTS[0] + TEXTS[0][0], PROMPTS[0] + TEXTS[0][1], PROMPTS[1] + TEXTS[1][0], PROMPTS[1] + " one "]
        assert [choice["text"] for choice in choices] == texts
        assert [choice["finish_reason"] for choice in choices] == ["length", "length", "length", "stop"]


async def test_values_of_choices_count_before_any_work(front: Front) -> None:
    """The limit is for what is shown, and every choice shows the prompt's."""
    body = {"prompt": [[5] * 400] * 20, "echo": True, "logprobs": 20, "max_tokens": 0}
    front.generator.script_of = {5: script([], 20, prompt=[5] * 400)}
    assert (await front.http.post(COMPLETIONS, json=body)).status_code == 200
    front.generator.seen.clear()
    response = await front.http.post(COMPLETIONS, json=body | {"n": 4})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
    assert front.generator.seen == []


async def test_a_client_that_leaves_in_the_echo_ends_all(front: Front) -> None:
    play(front, 0, scored=True)
    for prompt, steps in front.generator.script_of.items():
        front.generator.script_of[prompt] = [steps[0], asyncio.Event()]
    cancelled = front.metrics.count("completions", "cancelled")
    body = {"prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 0, "stream": True}
    async with front.http.stream("POST", COMPLETIONS, json=body) as response:
        async for line in response.aiter_lines():
            if PROMPTS[0][:3] in line:
                break
    await front.metrics.reaches("completions", "cancelled", cancelled + 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_each_choice_of_a_chat(front: Front, stream: bool) -> None:
    ids = play(front, 2, scored=False)[:2]
    front.generator.script = front.generator.script_of[ids_of(front, PROMPTS[0])[0]]
    front.generator.script_of = {}
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "n": 2, "logprobs": True, "top_logprobs": 2, "stream": stream}
    if stream:
        choices = [choice for frame in await frames(front, "/v1/chat/completions", body) for choice in frame["choices"]]
    else:
        choices = (await front.http.post("/v1/chat/completions", json=body)).json()["choices"]
    for index in range(2):
        given = [c["logprobs"]["content"] for c in choices if c["index"] == index and c["logprobs"]]
        entries = [entry for one in given for entry in one]
        assert [entry["logprob"] for entry in entries] == [score(token_id, 2).chosen for token_id in ids[index]]
        assert {len(entry["top_logprobs"]) for entry in entries} == {2}
