"""vLLM's ``prompt_logprobs``: by token id, beside the text, whatever that shows itself."""

from __future__ import annotations

from typing import Any

import pytest
from front_harness import CHAT, COMPLETIONS, HELLO, Front, check_refusal

from cluster.request import TokenLogprobs
from router.generation import TokenDelta

pytestmark = pytest.mark.asyncio(loop_scope="module")

# " Paris" (7042) is the second likeliest here, or none of the likeliest.
FOUND = (
    TokenLogprobs(-1.5, ((260, -0.5), (7042, -1.5), (282, -2.5)), rank=2),
    TokenLogprobs(-7.25, ((282, -0.25), (260, -2.0), (7042, -3.0)), rank=123),
)
PROMPT = [464, 7042, 9000]


def script(prompt_logprobs: tuple[TokenLogprobs, ...] = FOUND, num_choices: int = 1) -> list[TokenDelta]:
    return [
        TokenDelta((5,), "length", 0 if choice == 0 else None, (), choice, prompt_logprobs if choice == 0 else ())
        for choice in range(num_choices)
    ]


def written(front: Front, num_top: int) -> list[Any]:
    """vLLM's form: the prompt's own token first, its rank that of the likeliest where it is one of them."""

    def one(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = front.tokenizer.decode([token_id])
        return {str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text}}

    lists = []
    for token_id, found in zip(PROMPT[1:], FOUND, strict=True):
        entries = one(token_id, found.chosen, found.rank)
        for rank, (top_id, logprob) in enumerate(found.top[:num_top], 1):
            entries |= one(top_id, logprob, rank)
        lists.append(entries)
    return [None, *lists]


@pytest.mark.parametrize("num_top", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
async def test_completions_have_them_in_each_choice(front: Front, num_top: int, n: int) -> None:
    front.generator.script = script(num_choices=n)
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": num_top, "n": n}
    answer = (await front.http.post(COMPLETIONS, json=body)).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [written(front, num_top)] * n
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * n
    assert front.generator.seen[0].num_prompt_logprobs == num_top
    assert answer["usage"]["prompt_tokens"] == 3


async def test_the_entries_come_in_the_order_of_vllm(front: Front) -> None:
    front.generator.script = script()
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2}
    (choice,) = (await front.http.post(COMPLETIONS, json=body)).json()["choices"]
    assert [list(entries or ()) for entries in choice["prompt_logprobs"]] == [
        [],
        ["7042", "260"],
        ["9000", "282", "260"],
    ]


async def test_chats_have_them_once(front: Front) -> None:
    front.generator.script = script((), num_choices=2)
    body = {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 1, "n": 2}
    assert (await front.http.post(CHAT, json=body)).status_code == 500  # what the nodes gave is not complete
    asked = front.generator.seen[0].prompt_token_ids
    front.generator.script = script(tuple(TokenLogprobs(-1.0, ((7, -0.5),), 4) for _ in asked[1:]), num_choices=2)
    answer = (await front.http.post(CHAT, json=body)).json()
    assert answer["prompt_logprobs"][0] is None
    assert [list(entries) for entries in answer["prompt_logprobs"][1:]] == [[str(one), "7"] for one in asked[1:]]
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_an_echo_beside_them_shows_as_many_as_it_was_asked_for(front: Front) -> None:
    front.generator.script = [TokenDelta((), "length", 0, prompt_logprobs=FOUND)]
    for echoed, asked in ((1, 3), (3, 1)):
        logprobs = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": echoed, "prompt_logprobs": asked}
        (choice,) = (await front.http.post(COMPLETIONS, json=logprobs)).json()["choices"]
        assert choice["prompt_logprobs"] == written(front, asked)
        assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [
            0,
            *((2, 2) if echoed == 1 else (3, 4)),
        ]
    assert [seen.num_prompt_logprobs for seen in front.generator.seen] == [3, 3]


async def test_nobody_else_gets_them(front: Front) -> None:
    front.generator.script = script(())
    answer = (await front.http.post(COMPLETIONS, json={"prompt": PROMPT, "prompt_logprobs": None})).json()
    assert "prompt_logprobs" not in answer["choices"][0]
    assert front.generator.seen[0].num_prompt_logprobs is None


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})])
@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 0, "stream": True}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}]
)
async def test_what_cannot_be_had(front: Front, path: str, prompt: dict[str, Any], fields: dict[str, Any]) -> None:
    error = await check_refusal(front, await front.http.post(path, json=prompt | fields), 400)
    assert error["param"] == "prompt_logprobs"


async def test_too_many_values_are_refused_before_any_work(front: Front) -> None:
    for body in (
        {"prompt": [[5] * 400] * 128, "prompt_logprobs": 20, "max_tokens": 1},
        {"prompt": [5] * 400, "prompt_logprobs": 20, "max_tokens": 1, "n": 128},
    ):
        error = await check_refusal(front, await front.http.post(COMPLETIONS, json=body), 400)
        assert error["param"] == "prompt_logprobs"
        front.generator.reset()
