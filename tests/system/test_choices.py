"""`n` at the real system: openai-python, streamed and whole, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.system.oracle import Oracle
from tests.system.stack import Stack, running_stack, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

BLOCK = 16
LENGTHS = (15, 16, 17, 31, 32, 33)
HELLO: Any = [{"role": "user", "content": "Name a colour."}]
Check = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path, oracle: Oracle) -> Iterator[Stack]:
    with running_stack(demo_model_dir, options=("--transport", "tcp", "--block-size", str(BLOCK))) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="k", max_retries=0, timeout=120) as client:
        yield client


def _ids(answer: dict[str, Any]) -> list[list[int]]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.parametrize("length", LENGTHS)
def test_three_choices_at_block_boundaries(
    stack: Stack, prompts: list[list[int]], oracle: Oracle, nothing_left: Check, length: int
) -> None:
    prompt = next(p for p in prompts if len(p) == length)
    stack.complete(prompts[0], 2)
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 20}
    with nothing_left(stack):
        computed = stack.total("prefill", "baton_prefill_computed_tokens_total")
        greedy = stack.complete(prompt, 8, n=3)
        assert stack.total("prefill", "baton_prefill_computed_tokens_total") - computed <= length
        sampled = stack.complete(prompt, n=3, **seeded)
        again = stack.complete(prompt, n=3, **seeded)
        first = stack.complete(prompt, **seeded)
    expected = oracle(prompt, 8)
    if expected is not None:
        assert _ids(greedy) == [expected] * 3
    assert greedy["usage"]["prompt_tokens"] == length
    assert len({tuple(ids) for ids in _ids(sampled)}) == 3
    assert _ids(again) == _ids(sampled)
    assert _ids(sampled)[0] == _ids(first)[0]
    assert sampled["usage"]["completion_tokens"] == 60


def test_the_client_library_streams_three(stack: Stack, client: openai.OpenAI, nothing_left: Check) -> None:
    options: Any = {"model": "", "messages": HELLO, "n": 3, "seed": 3, "max_tokens": 24, "temperature": 1.0}
    client.chat.completions.create(**options)
    with nothing_left(stack, sockets=False):
        whole = client.chat.completions.create(**options)
        text, finishes, roles, usage = {0: "", 1: "", 2: ""}, [], [], None
        for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                text[choice.index] += choice.delta.content or ""
                if choice.delta.role:
                    assert not any(text.values()), "a role after content"
                    roles.append(choice.index)
                if choice.finish_reason:
                    finishes.append((choice.index, choice.finish_reason))
            usage = chunk.usage or usage
    assert roles == [0, 1, 2]
    assert dict(finishes) == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(finishes) == 3
    assert text == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(text.values())) == 3
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_a_stop_string_of_one_choice_frees_its_blocks_while_the_others_run(
    stack: Stack, client: openai.OpenAI, nothing_left: Check
) -> None:
    options: Any = {"model": "", "messages": HELLO, "n": 3, "seed": 3, "max_tokens": 40, "temperature": 1.0}
    plain = client.chat.completions.create(**options)
    texts = [choice.message.content or "" for choice in plain.choices]
    stop = next(
        text[start : start + 4]
        for text in texts
        for start in range(3, len(text) - 4)
        if sum(text[start : start + 4] in other for other in texts) == 1
    )
    with nothing_left(stack, sockets=False):
        cut = client.chat.completions.create(**options, stop=stop)
    for choice, text in zip(cut.choices, texts, strict=True):
        assert choice.message.content == text.partition(stop)[0]
    assert [choice.finish_reason for choice in cut.choices].count("stop") >= 1


def test_leaving_frees_all_choices(stack: Stack, nothing_left: Check) -> None:
    body = {"messages": HELLO, "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with nothing_left(stack):
        with httpx.Client(base_url=stack.base_url, timeout=120, trust_env=False) as http:
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()  # dropping it would be leaving
                next(lines)
                wait_for("eight choices run", lambda: stack.total("decode", "baton_requests_running") == 8)
                (decode,) = [r.http_address for r in stack.records().values() if r.role == "decode"]
                held = httpx.get(f"{decode}/debug/kv", trust_env=False).json()
        owners = [block["owners"] for block in held["blocks"]]
        assert max(map(len, owners)) == 8, "the prompt's full blocks belong to all"
        assert held["orphaned"] == []
