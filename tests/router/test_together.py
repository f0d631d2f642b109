"""Tokens that are there at the same time: the same answer as if each had come alone, in as few writes as possible."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_generator import deltas
from front_harness import MODEL, Front
from prometheus_client import CollectorRegistry

from cluster.request import TokenLogprobs
from router.completion import FORMATS, Piece, ReplyHead
from router.generation import TokenDelta
from router.metrics import TokenHistogram
from router.tokenizer import Tokenizer

TEXT = 'Once "upon" a\ttime\n\u2028 there was 🙂 a naïve café; then it ended. And went on.'


async def stream(front: Front, **options: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 100, **options}
    response = await front.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    *frames, done = [frame.removeprefix("data: ") for frame in response.text.removesuffix("\n\n").split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(frame) | {"id": "", "created": 0} for frame in frames]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ["ended"]},
        {"stop": ["then it went", "café; th"], "include_stop_str_in_output": True},
        {"logprobs": 0, "stop": "naïve"},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stop": ["time"]},
        {"stream_options": {"include_usage": True}, "min_tokens": 20, "stop": ["a"]},
        {"echo": True},
    ],
)
@pytest.mark.parametrize("size", [2, 5, 1000])
async def test_a_stream_is_the_same_however_tokens_come(front: Front, size: int, options: dict[str, Any]) -> None:
    ids = front.replay(TEXT)
    alone = [
        TokenDelta(d.token_ids, d.finish_reason, d.cached_tokens, logprobs_of(d) if "logprobs" in options else ())
        for d in deltas(ids)
    ]
    front.generator.script = alone
    expected = await stream(front, **options)
    front.generator.script = [alone[start : start + size] for start in range(0, len(alone), size)]
    assert await stream(front, **options) == expected
    assert len(expected) > len(ids) // 2 or "stop" in options


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_that_come_together(front: Front) -> None:
    first, second = (front.replay(text) for text in ("one two stop three", "four five six"))
    script = [
        [
            TokenDelta((ids[0],), None, 0 if choice == 0 else None, choice=choice)
            for choice, ids in enumerate((first, second))
        ],
        [
            TokenDelta((token_id,), "length" if at == len(ids) - 1 else None, choice=choice)
            for choice, ids in enumerate((first, second))
            for at, token_id in enumerate(ids)
            if at
        ],
    ]
    front.generator.script = script
    frames = await stream(front, n=2, stop="stop", temperature=1)
    texts = ["".join(c["text"] for f in frames for c in f["choices"] if c["index"] == index) for index in (0, 1)]
    assert texts == ["one two ", "four five six"]
    ends = [(c["index"], c["finish_reason"]) for f in frames for c in f["choices"] if c["finish_reason"]]
    assert ends == [(0, "stop"), (1, "length")]


def logprobs_of(delta: TokenDelta) -> tuple[Any, ...]:
    return tuple(TokenLogprobs(-float(token_id) / 1000) for token_id in delta.token_ids)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("text", [TEXT, '"', "\\", "\x00", "}", "é", " "])
def test_a_chunk_of_text_is_what_any_chunk_would_be(tokenizer: Tokenizer, endpoint: Any, text: str) -> None:
    written = FORMATS[endpoint](ReplyHead('i"d', 7, 'mo"del é', None, tokenizer))
    for index in (0, 3, 0):
        expected = written.chunk(index, Piece(text, (1,)), None, with_ids=False)
        assert written.text_chunks(index, [text]) == expected
        assert written.text_chunks(index, ["", text, text, ""]) == expected * 2
        assert written.text_chunks(index, [""]) == written.text_chunks(index, []) == b""


def test_a_histogram_of_tokens_counts_as_prometheus_does() -> None:
    registry = CollectorRegistry()
    seen = TokenHistogram("x_seconds", "X.", buckets=(0.5, 1), registry=registry)
    for value, times in ((0.5, 1), (0.0, 3), (0.75, 1), (7.0, 1)):
        seen.observe(value, times)
    counts = [registry.get_sample_value("x_seconds_bucket", {"le": bound}) for bound in ("0.5", "1.0", "+Inf")]
    assert counts == [4, 5, 6]
    assert registry.get_sample_value("x_seconds_count") == 6
    assert registry.get_sample_value("x_seconds_sum") == 8.25
