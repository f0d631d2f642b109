"""Log-probabilities through both nodes against Hugging Face: prompts (echo), token 0 (made on P) and later ones (D)."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from tests.api.conftest import MODEL, LogSoftmax, gather_posts
from tests.system.prompts import TEXT, boundary_lengths
from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left")]

TOLERANCE = 1e-4
HELLO: Any = [{"role": "user", "content": "What is the capital of France?"}]


def check_values(logprobs: dict[str, Any], ids: list[int], wanted: Any, *, num_top: int, first: int = 1) -> None:
    """Each token's value is log-softmax's at its place; the dictionary holds the likeliest and the token itself."""
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    for place in range(first, len(ids)):
        value, top = logprobs["token_logprobs"][place], logprobs["top_logprobs"][place]
        assert value == pytest.approx(wanted[place - 1, ids[place]].item(), abs=TOLERANCE)
        assert top[logprobs["tokens"][place]] == value
        likeliest = wanted[place - 1].topk(max(num_top, 1)).values.tolist()
        values = sorted(top.values(), reverse=True)
        assert values[:num_top] == pytest.approx(likeliest[:num_top], abs=TOLERANCE)


def prompts_of(tokenizer: tokenizers.Tokenizer) -> list[list[int]]:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    return [ids[3 * n : 3 * n + length] for n, length in enumerate([*boundary_lengths(16), 40, 41, 80, 130])]


def test_c8_echo_is_log_softmax_at_every_length_under_load(
    stack: Stack, text_tokenizer: tokenizers.Tokenizer, log_softmax: LogSoftmax
) -> None:
    """All at once, twice: the second time every prompt is in the prefix caches (C7)."""
    prompts = prompts_of(text_tokenizer)
    warm = [{"prompt": prompt, "max_tokens": 1, "temperature": 0} for prompt in prompts]
    asyncio.run(gather_posts(stack, "/v1/completions", warm))
    bodies = [
        {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        for prompt in prompts
    ]
    for _ in range(2):
        for prompt, answer in zip(prompts, asyncio.run(gather_posts(stack, "/v1/completions", bodies)), strict=True):
            (choice,) = answer["choices"]
            ids = [*prompt, *choice["token_ids"]]
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["top_logprobs"][0] is None
            check_values(choice["logprobs"], ids, log_softmax(ids), num_top=2)
            assert choice["text"].startswith(text_tokenizer.decode(prompt))
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert "".join(choice["logprobs"]["tokens"][: len(prompt)]) == text_tokenizer.decode(prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_l2_l3_every_choice_of_every_prompt_shows_it_and_its_values(
    stack: Stack, http: httpx.Client, text_tokenizer: tokenizers.Tokenizer, log_softmax: LogSoftmax, stream: bool
) -> None:
    """Index i * n + j; the prompt is scored once for its choices, which then differ."""
    prompts = prompts_of(text_tokenizer)[:2]
    computed = stack.total("prefill", "baton_prefill_computed_tokens_total")
    body = {"prompt": prompts, "n": 3, "echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 1.5, "seed": 3}
    options = {"return_token_ids": True, "stream": stream}
    response = http.post("/v1/completions", json=body | options)
    if stream:
        events = response.text.split("\n\n")[:-2]
        chunks = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    else:
        chunks = response.json()["choices"]
        assert response.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert stack.total("prefill", "baton_prefill_computed_tokens_total") - computed == sum(map(len, prompts))
    seen = set()
    for index in range(6):
        prompt, theirs = prompts[index // 3], [chunk for chunk in chunks if chunk["index"] == index]
        ids = [*prompt, *(token_id for chunk in theirs for token_id in chunk["token_ids"])]
        given = [chunk["logprobs"] for chunk in theirs if chunk["logprobs"]]
        logprobs = {name: [value for one in given for value in one[name]] for name in given[0]}
        check_values(logprobs, ids, log_softmax(ids), num_top=2)
        assert "".join(chunk["text"] for chunk in theirs).startswith(text_tokenizer.decode(prompt))
        seen.add(tuple(ids))
    assert len(seen) == 6


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_log_softmax(
    http: httpx.Client, text_tokenizer: tokenizers.Tokenizer, log_softmax: LogSoftmax, path: str
) -> None:
    """Twice: the second time the prompt is in the prefix caches."""
    prompt = {"prompt": prompts_of(text_tokenizer)[-1]} if path == "/v1/completions" else {"messages": HELLO}
    body = prompt | {"max_tokens": 3, "temperature": 0, "prompt_logprobs": 3, "return_token_ids": True}
    for _ in range(2):
        answer = http.post(path, json=body).json()
        holder = answer["choices"][0] if path == "/v1/completions" else answer
        asked = holder["prompt_token_ids"]
        wanted = log_softmax(asked)
        assert holder["prompt_logprobs"][0] is None
        assert len(holder["prompt_logprobs"]) == len(asked)
        for place, entries in enumerate(holder["prompt_logprobs"][1:], 1):
            found, values = entries[str(asked[place])], wanted[place - 1]
            assert found["logprob"] == pytest.approx(values[asked[place]].item(), abs=TOLERANCE)
            assert found["decoded_token"] == text_tokenizer.decode([asked[place]], skip_special_tokens=False)
            # How many are likelier is certain only to rounding.
            likelier = [int((values > values[asked[place]] + slack).sum()) + 1 for slack in (TOLERANCE, -TOLERANCE)]
            assert likelier[0] <= found["rank"] <= likelier[1]
            top = sorted(entries.values(), key=lambda one: one["rank"])[:3]
            assert [one["rank"] for one in top] == [1, 2, 3]
            assert [one["logprob"] for one in top] == pytest.approx(values.topk(3).values.tolist(), abs=TOLERANCE)


def test_f11_scoring_does_not_decode(
    stack: Stack, http: httpx.Client, text_tokenizer: tokenizers.Tokenizer, log_softmax: LogSoftmax
) -> None:
    prompts = prompts_of(text_tokenizer)[-3:]
    ends = ("intakes_finished", "intakes_cancelled", "intakes_failed", "generated_tokens")
    before = [stack.total("decode", f"baton_{end}_total") for end in ends]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text_tokenizer.decode(prompt), "length")
        check_values(choice["logprobs"], prompt, log_softmax(prompt), num_top=1)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert [stack.total("decode", f"baton_{end}_total") for end in ends] == before


@pytest.mark.parametrize("echo", [False, True])
def test_q4_token_0_comes_once_in_every_form(
    http: httpx.Client, text_tokenizer: tokenizers.Tokenizer, log_softmax: LogSoftmax, echo: bool
) -> None:
    prompt = "The lighthouse keeper — 東京 — had a"
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 3, "echo": echo, "return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    asked = text_tokenizer.encode(prompt, add_special_tokens=False).ids
    ids = [*asked, *whole["token_ids"]]
    wanted = log_softmax(ids)
    if echo:
        check_values(whole["logprobs"], ids, wanted, num_top=3)
    else:
        check_values(whole["logprobs"], whole["token_ids"], wanted[len(asked) - 1 :][1:], num_top=3)
        first = wanted[len(asked) - 1, whole["token_ids"][0]].item()
        assert whole["logprobs"]["token_logprobs"][0] == pytest.approx(first, abs=TOLERANCE)
    response = http.post("/v1/completions", json=body | {"stream": True})
    events = response.text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]] == values


async def test_c5_chat_through_openai(client: openai.AsyncOpenAI, log_softmax: LogSoftmax) -> None:
    options: Any = {"max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 4}
    more = {"return_token_ids": True}
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, **options, extra_body=more)
    choice: Any = answer.choices[0]
    content = choice.logprobs.content
    asked = list(answer.prompt_token_ids)  # type: ignore[attr-defined]
    wanted = log_softmax([*asked, *choice.token_ids])[len(asked) - 1 :]
    assert answer.usage is not None
    assert len(content) == len(choice.token_ids) == answer.usage.completion_tokens
    assert (choice.finish_reason, content[-1].token) == ("stop", "<|im_end|>")
    for place, (one, token_id) in enumerate(zip(content, choice.token_ids, strict=True)):
        assert one.logprob == pytest.approx(wanted[place, token_id].item(), abs=TOLERANCE)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(
            wanted[place].topk(4).values.tolist(), abs=TOLERANCE
        )
        assert one.logprob == one.top_logprobs[0].logprob  # greedy
    assert b"".join(bytes(one.bytes) for one in content[:-1]).decode() == choice.message.content
    async with client.chat.completions.stream(model=MODEL, messages=HELLO, **options) as stream:
        async for _ in stream:
            pass
        streamed: Any = (await stream.get_final_completion()).choices[0]
    assert [one.logprob for one in streamed.logprobs.content] == [one.logprob for one in content]


def test_usage_tells_true_cached_tokens(stack: Stack, http: httpx.Client) -> None:
    """As the prefill node counts them: whole blocks of an earlier prompt, and never the last token."""
    prompt = [1000 + n for n in range(50)]
    counted = stack.total("prefill", "baton_prefix_cached_tokens_total")
    for cached in (0, 48, 48):
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert stack.total("prefill", "baton_prefix_cached_tokens_total") - counted == 96


def high_water_mb(stack: Stack, name: str) -> float:
    status = Path(f"/proc/{stack.pids[name]}/status").read_text()
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kilobytes) / 1024


def test_f10_a_long_prompt_is_scored_in_little_memory(stack: Stack, http: httpx.Client) -> None:
    """All its logits at once would be 393 MB."""
    prompt = [1000 + n % 5000 for n in range(2000)]
    before = {name: high_water_mb(stack, name) for name in ("prefill-0", "decode-0", "router")}
    answer = http.post("/v1/completions", json={"prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": 0}).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 2000
    for name, megabytes in before.items():
        assert high_water_mb(stack, name) - megabytes < 150, name
