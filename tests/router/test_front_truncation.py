"""``truncate_prompt_tokens``: the end of a prompt is kept, and only that is counted and shown."""

from __future__ import annotations

from typing import Any

import pytest
from front_harness import CHAT, COMPLETIONS, CONTEXT, Front, check_refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The lighthouse keeper had a dog, and the dog — 東京 — had a lighthouse. "


async def asked(front: Front, path: str, body: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The prompt as the nodes get it, and the answer."""
    front.generator.reset()
    front.replay("x")
    response = await front.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    (seen,) = front.generator.seen
    assert answer["usage"]["prompt_tokens"] == len(seen.prompt_token_ids)
    return seen.prompt_token_ids, answer


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("keep", [1, 7, 20, 400])
async def test_the_last_tokens_are_kept(front: Front, path: str, keep: int) -> None:
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    whole, _ = await asked(front, path, prompt)
    kept, _ = await asked(front, path, prompt | {"truncate_prompt_tokens": keep})
    assert kept == whole[-keep:]


async def test_of_token_ids_too(front: Front) -> None:
    for prompt in ([1, 2, 3, 4], [[1, 2, 3, 4]]):
        kept, _ = await asked(front, COMPLETIONS, {"prompt": prompt, "truncate_prompt_tokens": 3})
        assert kept == (2, 3, 4)


@pytest.mark.parametrize(("max_tokens", "left"), [(None, 16), (1, 1), (100, 100)])
@pytest.mark.parametrize("times", [40, 2_000])
async def test_minus_1_keeps_what_fits_a_completion(
    front: Front, max_tokens: int | None, left: int, times: int
) -> None:
    """Even of a text so long that it would be refused unread."""
    body = {"prompt": TEXT * times, "truncate_prompt_tokens": -1, "max_tokens": max_tokens}
    kept, _ = await asked(front, COMPLETIONS, body)
    assert len(kept) == CONTEXT - left
    assert (TEXT * times).endswith(front.tokenizer.decode(kept).lstrip("\ufffd"))


@pytest.mark.parametrize(("max_tokens", "left"), [(None, 1), (100, 100)])
async def test_minus_1_keeps_what_fits_a_chat(front: Front, max_tokens: int | None, left: int) -> None:
    messages = [{"role": "user", "content": TEXT * 40}]
    kept, _ = await asked(front, CHAT, {"messages": messages, "truncate_prompt_tokens": -1, "max_tokens": max_tokens})
    assert len(kept) == CONTEXT - left
    assert front.generator.seen[0].sampling.max_tokens == left


async def test_an_echo_shows_what_was_kept(front: Front) -> None:
    for keep in (5, 400):
        body = {"prompt": TEXT, "truncate_prompt_tokens": keep, "echo": True}
        kept, answer = await asked(front, COMPLETIONS, body)
        assert answer["choices"][0]["text"] == front.tokenizer.decode(kept) + "x"


async def test_what_is_still_too_long_is_refused(front: Front) -> None:
    body = {"prompt": TEXT * 40, "truncate_prompt_tokens": CONTEXT, "max_tokens": 1}
    await check_refusal(front, await front.http.post(COMPLETIONS, json=body), 400, "context_length_exceeded")
