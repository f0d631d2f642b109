"""`n` and lists of prompts over HTTP: every choice is a whole answer, and ends by itself."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

import pytest
from fake_generator import Step, deltas
from front_harness import MODEL, Front
from test_front import HELLO, frames

from cluster.errors import WorkerLostError
from router.generation import TokenDelta

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = [" One two three", " Un 東京", " Eins zwei drei vier fünf"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def replay(front: Front, texts: list[str], finish: str = "length", **options: int) -> list[int]:
    """Each choice answers its text, a token in turn; returns the number of tokens of each."""
    scripts = []
    for choice, text in enumerate(texts):
        ids = front.tokenizer._backend.encode(text, add_special_tokens=False).ids
        scripts.append(
            [
                TokenDelta(one.token_ids, one.finish_reason, one.cached_tokens if choice == 0 else None, choice=choice)
                for one in deltas(ids, finish, **options)  # type: ignore[arg-type]
            ]
        )
    front.generator.script = [delta for delta in chain.from_iterable(zip_longest(*scripts)) if delta is not None]
    return [len(script) for script in scripts]


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return {"messages": HELLO, **more} if path == CHAT else {"prompt": "x", **more}


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_come_sorted_and_the_prompt_counts_once(front: Front, path: str) -> None:
    sizes = replay(front, TEXTS, cached=3)
    answer = (await front.http.post(path, json=body_of(path, n=3))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [text_of(choice) for choice in answer["choices"]] == TEXTS
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    (generation,) = front.generator.seen
    assert generation.sampling.num_choices == 3
    prompt_tokens = len(generation.prompt_token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sum(sizes),
        "total_tokens": prompt_tokens + sum(sizes),
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_of_three_is_the_whole_answer_of_three(front: Front, path: str) -> None:
    sizes = replay(front, TEXTS)
    seen = await frames(front, path, body_of(path, n=3, stream_options={"include_usage": True}))
    usage, choices = seen[-1]["usage"], [choice for frame in seen for choice in frame["choices"]]
    assert [len(frame["choices"]) for frame in seen] == [1] * (len(seen) - 1) + [0]
    for index, text in enumerate(TEXTS):
        theirs = [choice for choice in choices if choice["index"] == index]
        assert "".join(map(text_of, theirs)) == text
        assert [choice["finish_reason"] for choice in theirs] == [None] * (len(theirs) - 1) + ["length"]
    assert usage["completion_tokens"] == sum(sizes)
    assert usage["prompt_tokens"] == len(front.generator.seen[0].prompt_token_ids)


async def test_roles_come_first_and_in_order(front: Front) -> None:
    replay(front, TEXTS)
    seen = await frames(front, CHAT, body_of(CHAT, n=3, return_token_ids=True))
    opening = [frame["choices"][0] for frame in seen[:3]]
    assert [(choice["index"], choice["delta"]) for choice in opening] == [
        (index, {"role": "assistant", "content": ""}) for index in range(3)
    ]
    assert [frame["choices"][0]["index"] for frame in seen if "prompt_token_ids" in frame] == [0]
    assert not any("role" in frame["choices"][0]["delta"] for frame in seen[3:])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_choice_only(front: Front, stream: bool) -> None:
    replay(front, TEXTS)
    body = body_of(COMPLETIONS, n=3, stop=[" zwei"])
    if stream:
        choices = [choice for frame in await frames(front, COMPLETIONS, body) for choice in frame["choices"]]
    else:
        choices = (await front.http.post(COMPLETIONS, json=body)).json()["choices"]
    texts = ["".join(text_of(c) for c in choices if c["index"] == index) for index in range(3)]
    assert texts == [TEXTS[0], TEXTS[1], " Eins"]
    ends = {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]}
    assert ends == {0: ("length", None), 1: ("length", None), 2: ("stop", " zwei")}


async def test_stop_strings_that_end_all_end_the_request(front: Front) -> None:
    replay(front, [" a stop b c d", " e f stop g"])
    answer = (await front.http.post(COMPLETIONS, json=body_of(COMPLETIONS, n=2, stop="stop"))).json()
    assert [text_of(choice) for choice in answer["choices"]] == [" a ", " e f "]
    assert front.generator.num_finished == 0


async def test_a_choice_that_ends_with_token_0_leaves_the_others(front: Front) -> None:
    script: list[Step] = [
        TokenDelta((100,), "length", 0, choice=0),
        TokenDelta((101,), None, choice=1),
        TokenDelta((102,), "length", choice=1),
    ]
    front.generator.script = script
    answer = (await front.http.post(COMPLETIONS, json=body_of(COMPLETIONS, n=2))).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_times_choices(front: Front, stream: bool) -> None:
    """Choice j of prompt i has index i * n + j."""
    for number in (5, 6):
        front.generator.script_of[number] = [
            TokenDelta((100 * number + choice,), "length", 1 if choice == 0 else None, choice=choice)
            for choice in range(3)
        ]
    body = {"prompt": [[5, 1], [6]], "n": 3, "return_token_ids": True}
    if stream:
        body |= {"stream_options": {"include_usage": True}}
        seen = await frames(front, COMPLETIONS, body)
        choices, usage = [choice for frame in seen for choice in frame["choices"]], seen[-1]["usage"]
        prompts = {c["index"]: c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c}
        choices = [choice for choice in choices if choice["finish_reason"]]
    else:
        answer = (await front.http.post(COMPLETIONS, json=body)).json()
        choices, usage = answer["choices"], answer["usage"]
        prompts = {c["index"]: c["prompt_token_ids"] for c in choices}
        assert [choice["index"] for choice in choices] == list(range(6))
    ids = {choice["index"]: choice["token_ids"] for choice in choices}
    assert ids == {index: [500 + index if index < 3 else 600 + index - 3] for index in range(6)}
    assert prompts == {index: [5, 1] if index < 3 else [6] for index in range(6)}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 6)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_a_failure_in_the_middle_is_one_error(front: Front) -> None:
    replay(front, TEXTS)
    front.generator.script = [*front.generator.script[:4], WorkerLostError("a node was lost")]
    response = await front.http.post(CHAT, json=body_of(CHAT, n=3, stream=True))
    assert response.text.count("event: error") == 1
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("n", "best_of"), [(1, 1), (3, 1), (3, 3), (3, None), (None, 1)])
async def test_best_of_that_asks_for_nothing_more(front: Front, n: int | None, best_of: int | None) -> None:
    replay(front, TEXTS[: n or 1])
    body = body_of(COMPLETIONS, n=n, best_of=best_of)
    answer = (await front.http.post(COMPLETIONS, json=body)).json()
    assert len(answer["choices"]) == (n or 1)


@pytest.mark.parametrize(("n", "best_of"), [(1, 2), (2, 3), (5, 3), (None, 2), (1, 10**6), (1, 2**63)])
async def test_best_of_that_asks_for_more_is_refused(front: Front, n: int | None, best_of: int) -> None:
    response = await front.http.post(COMPLETIONS, json=body_of(COMPLETIONS, n=n, best_of=best_of))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    assert front.generator.seen == []


@pytest.mark.parametrize(("num_prompts", "n"), [(9, 128), (128, 9)])
async def test_prompts_times_choices_have_a_limit(front: Front, num_prompts: int, n: int) -> None:
    response = await front.http.post(COMPLETIONS, json={"prompt": ["x"] * num_prompts, "n": n})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert front.generator.seen == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_share_the_pool(front: Front, path: str) -> None:
    """What is not asked for is cut to what fits; what is asked for and does not fit is refused."""
    front.generator.max_tokens = 100
    replay(front, TEXTS)
    await front.http.post(path, json=body_of(path, n=3))
    (generation,) = front.generator.seen
    assert generation.sampling.max_tokens <= (100 - len(generation.prompt_token_ids)) // 3
    response = await front.http.post(path, json=body_of(path, n=3, max_tokens=40))
    assert response.status_code == 400
    assert "maximum context length" in response.json()["error"]["message"]


async def test_the_client_library(front: Front) -> None:
    replay(front, TEXTS)
    shown: dict[int, str] = {}
    stream = await front.client.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True)  # type: ignore[call-overload]
    async for chunk in stream:
        for choice in chunk.choices:
            shown[choice.index] = shown.get(choice.index, "") + (choice.delta.content or "")
    assert shown == dict(enumerate(TEXTS))
