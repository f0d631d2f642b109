"""The sampler's and the text's options over HTTP: what a field means to the nodes, and what it changes in the text."""

from __future__ import annotations

from typing import Any

import pytest
from fake_generator import deltas
from front_harness import Front

from cluster.request import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello"}]
BODIES = [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})]
TEXT = "One two three four"


async def sampling_of(front: Front, path: str, body: dict[str, Any]) -> SamplingParams:
    front.generator.reset()
    front.replay("x")
    response = await front.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return front.generator.seen[0].sampling


@pytest.mark.parametrize(("path", "prompt"), BODIES, ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 2}, "temperature", 2.0),
        ({"temperature": 1e-320}, "temperature", 0.0),
        ({"top_k": 40}, "top_k", 40),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_p": 1e-320}, "top_p", 1e-320),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"repetition_penalty": 1e-9}, "repetition_penalty", 1e-9),
        ({"repetition_penalty": 1e9}, "repetition_penalty", 1e9),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 2}, "frequency_penalty", 2.0),
        ({"logit_bias": {"7": -100, "0": 100, "49151": 0.5}}, "logit_bias", ((7, -100.0), (0, 100.0), (49151, 0.5))),
        ({"logit_bias": {}}, "logit_bias", ()),
        ({"allowed_token_ids": [9, 8, 9]}, "allowed_token_ids", (9, 8)),
        # "Paris", with a space before it or not, is one token; "lighthouse" is one only after a space.
        ({"bad_words": ["Paris", " lighthouse"]}, "banned_token_ids", (38634, 7042, 33059)),
        ({"bad_words": ["Paris", " lighthouse", "Paris"]}, "bad_words", ((92, 24638),)),
        ({"min_tokens": 3, "max_tokens": 3}, "min_tokens", 3),
        ({"seed": -1}, "seed", -1),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"stop_token_ids": [9, 2]}, "stop_token_ids", (2, 9)),
        ({"stop_token_ids": [9], "ignore_eos": True}, "stop_token_ids", (9,)),
        ({"ignore_eos": True}, "stop_token_ids", ()),
    ],
    ids=str,
)
async def test_c4_c10_options_reach_the_nodes(
    front: Front, path: str, prompt: dict[str, Any], fields: dict[str, Any], name: str, value: Any
) -> None:
    assert getattr(await sampling_of(front, path, prompt | fields), name) == value


@pytest.mark.parametrize(("path", "prompt"), BODIES, ids=["chat", "completions"])
async def test_l4_what_asks_for_nothing_changes_nothing(front: Front, path: str, prompt: dict[str, Any]) -> None:
    plain = await sampling_of(front, path, prompt | {"seed": 5, "max_tokens": 4})
    neutral = {
        "top_k": None,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "min_tokens": 0,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "ignore_eos": False,
    }
    assert await sampling_of(front, path, prompt | {"seed": 5, "max_tokens": 4} | neutral) == plain


async def test_an_unseeded_request_gets_a_seed_of_its_own(front: Front) -> None:
    seeds = {(await sampling_of(front, "/v1/completions", {"prompt": "x"})).seed for _ in range(5)}
    assert len(seeds) == 5


async def texts(front: Front, body: dict[str, Any]) -> set[tuple[str, str, Any]]:
    """(text, finish reason, stop reason), whole and streamed, tokens one by one and all at once."""
    ids = front.replay(TEXT, "stop")
    seen = set()
    for per_delta in (1, 100):
        front.generator.script = deltas(ids, "stop", per_delta=per_delta)
        choice = (await front.http.post("/v1/completions", json=body | {"prompt": "x"})).json()["choices"][0]
        seen.add((choice["text"], choice["finish_reason"], choice["stop_reason"]))
        front.generator.script = deltas(ids, "stop", per_delta=per_delta)
        async with front.client.completions.with_streaming_response.create(
            model="", prompt="x", stream=True, extra_body=body
        ) as response:
            chunks = [chunk.choices[0] async for chunk in await response.parse()]
        reasons = [(chunk.finish_reason, chunk.stop_reason) for chunk in chunks if chunk.finish_reason]  # type: ignore[attr-defined]
        assert len(reasons) == 1
        seen.add(("".join(chunk.text for chunk in chunks), *reasons[0]))
    return seen


@pytest.mark.parametrize(
    ("body", "text", "stop_reason"),
    [
        ({"stop": " thr"}, "One two", " thr"),
        ({"stop": " thr", "include_stop_str_in_output": True}, "One two thr", " thr"),
        ({"stop": "wo", "min_tokens": 2}, TEXT, None),
        ({"stop": "four", "min_tokens": 2}, "One two three ", "four"),
        ({}, TEXT, None),
        ({"include_stop_str_in_output": True}, TEXT, None),
        ({"skip_special_tokens": False}, TEXT, None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, TEXT + "<|im_end|>", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True, "stop": "im_"}, TEXT + "<|im_", "im_"),
    ],
    ids=str,
)
async def test_e3_e8_text_options(front: Front, body: dict[str, Any], text: str, stop_reason: str | None) -> None:
    assert await texts(front, body) == {(text, "stop", stop_reason)}


async def test_special_tokens_in_the_middle_are_shown_if_asked_for(front: Front) -> None:
    ids = [*front.replay("One"), 1, *front.replay(" two")]
    for skipped, text in ((True, "One two"), (False, "One<|im_start|> two")):
        front.generator.script = deltas(ids)
        body = {"prompt": "x", "skip_special_tokens": skipped, "spaces_between_special_tokens": False}
        assert (await front.http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == text


async def test_s7_usage_in_every_chat_frame_never_falls(front: Front) -> None:
    ids = front.replay(TEXT, "stop", cached=3)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await front.client.chat.completions.create(
        model="",
        messages=HELLO,
        stream=True,
        stream_options=options,  # type: ignore[arg-type]
    )
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages)
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    last = usages[-1]
    assert last is not None
    assert last.prompt_tokens_details is not None
    assert (last.prompt_tokens_details.cached_tokens, last.total_tokens - last.prompt_tokens) == (3, len(ids))
