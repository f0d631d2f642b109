"""Nobody can tell that there are two pools: every answer is, to the byte, that of one engine in one process."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.system.one_process import one_process_app
from tests.system.stack import Stack, running_stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

BLOCK, MODEL = 16, "smollm2-135m"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalised": {"temperature": 1.0, "seed": 5, "presence_penalty": 0.7, "repetition_penalty": 1.2},
}
FORMS: dict[str, dict[str, Any]] = {
    "free": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}},
    "choice": {"structured_outputs": {"choice": ["yes", "no", "not yet"]}},
}
STOPS: dict[str, dict[str, Any]] = {"on": {}, "stop": {"stop": ["e", "\n\n"]}}
SCORES: dict[str, dict[str, Any]] = {"plain": {}, "logprobs": {"logprobs": 2}, "echo": {"logprobs": 1, "echo": True}}
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 49)
# Of the 2,304 as many as --full has time for, and the first of them always; the seed makes it the same set each time.
CASES = random.Random(4).sample(
    list(itertools.product(SAMPLINGS, FORMS, STOPS, SCORES, (1, 3), (False, True), LENGTHS)), 72
)
NUM_ALWAYS = 12


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    options = ("--transport", "tcp", "--block-size", str(BLOCK), "--max-batch-tokens", "20")
    with running_stack(demo_model_dir, options=options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle_client(demo_model_dir: Path) -> Any:
    app = one_process_app(demo_model_dir, MODEL, BLOCK, 512)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://oracle", timeout=300) as client:
        yield client


def prompt_of(case: tuple[Any, ...], prompts: list[list[int]]) -> list[int]:
    """A text of that many tokens that no other case begins with: what its cache holds is its own doing."""
    text = next(p for p in prompts if len(p) >= 49)
    return [1000 + CASES.index(case), *text][: case[-1]]


def comparable(answer: httpx.Response, *, stream: bool) -> Any:
    """The answer without what differs between any two: ids and times. A stream's frames are put together."""
    assert answer.status_code == 200, answer.text
    if not stream:
        whole = answer.json()
        del whole["id"], whole["created"]
        return json.dumps(whole)
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for frame in (json.loads(line.removeprefix("data: ")) for line in lines):
        usage = frame.get("usage") or usage
        for choice in frame["choices"]:
            so_far = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": {}, "finish": []})
            so_far["text"] += choice["text"]
            so_far["token_ids"] += choice.get("token_ids") or []
            for name, values in (choice.get("logprobs") or {}).items():
                so_far["logprobs"].setdefault(name, []).extend(values)
            so_far["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert all(len(choice["finish"]) == 1 for choice in choices.values())
    return json.dumps([sorted(choices.items()), usage])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case)), marks=[] if number < NUM_ALWAYS else pytest.mark.full)
        for number, case in enumerate(CASES)
    ],
)
async def test_the_split_does_not_show(
    stack: Stack, oracle_client: httpx.AsyncClient, prompts: list[list[int]], case: tuple[Any, ...]
) -> None:
    sampling, form, stop, scores, n, stream, _length = case
    body = {"model": MODEL, "prompt": prompt_of(case, prompts), "max_tokens": 12, "n": n, "stream": stream}
    body |= SAMPLINGS[sampling] | FORMS[form] | STOPS[stop] | SCORES[scores] | {"return_token_ids": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=120, trust_env=False) as client:
        for _cold_then_cached in range(2):
            ours = comparable(await client.post("/v1/completions", json=body), stream=stream)
            theirs = comparable(await oracle_client.post("/v1/completions", json=body), stream=stream)
            assert ours == theirs
    if form == "schema" and stop == "on" and not stream and scores != "echo":
        for choice in json.loads(ours)["choices"]:
            if choice["finish_reason"] == "stop":
                assert set(json.loads(choice["text"])) == {"city", "big"}


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
CHOICES: dict[str, Any] = {"required": "required", "named": {"type": "function", "function": {"name": "look_up"}}}


@pytest.mark.parametrize(("choice", "sampling", "n"), [("required", "greedy", 1), ("named", "seeded", 2)])
async def test_the_split_does_not_show_in_calls_of_tools(
    stack: Stack, oracle_client: httpx.AsyncClient, choice: str, sampling: str, n: int
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Is Rome big?"}], "tools": [TOOL], "n": n}
    body |= SAMPLINGS[sampling] | {"tool_choice": CHOICES[choice], "parallel_tool_calls": False, "max_tokens": 80}
    body |= {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    answers = []
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=120, trust_env=False) as client:
        for one in (client, oracle_client):
            answer = await one.post("/v1/chat/completions", json=body)
            answers.append(json.loads(comparable(answer, stream=False)))
            for call in (call for part in answers[-1]["choices"] for call in part["message"]["tool_calls"]):
                del call["id"]
                assert set(json.loads(call["function"]["arguments"])) == {"city", "big"}
    assert answers[0] == answers[1]
