"""Log-probabilities from both nodes reach whoever asked, each with its token."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import TransferError
from cluster.request import SamplingParams, TokenLogprobs
from cluster.wire import (
    Commit,
    FirstToken,
    Message,
    PromptLogprobs,
    Refused,
    Reserve,
    Submit,
    Token0,
    TokenItem,
    Tokens,
)
from router.generation import Generation, TokenDelta
from tests.cluster.redis_server import eventually
from tests.router_dispatch.rig import one_by_one, running_rig


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), ((token_id, -float(token_id)), (0, -9999.0)))


async def test_logprobs_arrive_once_and_in_order() -> None:
    sampling = SamplingParams(max_tokens=4, num_logprobs=2)
    async with running_rig() as (rig, (prefill,), (decode,)):

        def answer(submit: Submit) -> list[Message]:
            items = (
                TokenItem(submit.key, 1, (11, 12), None, (logprobs_of(11), logprobs_of(12))),
                TokenItem(submit.key, 3, (13,), "length", (logprobs_of(13),)),
            )
            decode.send(rig.channel.party, Tokens(1, items))
            decode._forget(submit.key)
            prefill._forget(submit.key)
            return [Token0(submit.key, (FirstToken(0, 10, None, logprobs_of(10)),), 7, 0.0, 0.0)]

        prefill.on_submit = answer
        async with aclosing(one_by_one(rig.dispatcher.generate(Generation((1, 2, 3), sampling)))) as deltas:
            got = [delta async for delta in deltas]
        assert [message.sampling for message in decode.got if isinstance(message, Reserve)] == [sampling]
        assert decode.count(Commit) == 0
    assert got == [
        TokenDelta((10,), None, 7, (logprobs_of(10),)),
        TokenDelta((11, 12), None, None, (logprobs_of(11), logprobs_of(12))),
        TokenDelta((13,), "length", None, (logprobs_of(13),)),
    ]


def scored(submit: Submit, *parts: tuple[int, int]) -> list[Message]:
    """Scores of the prompt in messages of (start, count), then token 0, which is the end."""
    messages: list[Message] = [
        PromptLogprobs(submit.key, start, tuple(logprobs_of(start + place) for place in range(count)))
        for start, count in parts
    ]
    return [*messages, Token0(submit.key, (FirstToken(0, 10, "length", logprobs_of(10)),), 0, 0.0, 0.0)]


async def test_prompt_logprobs_come_with_token_0() -> None:
    asked = Generation((1, 2, 3, 4), SamplingParams(max_tokens=1, num_logprobs=0), num_prompt_logprobs=5)
    async with running_rig() as (rig, (prefill,), (decode,)):

        def answer(submit: Submit) -> list[Message]:
            assert submit.num_prompt_logprobs == 5
            decode._forget(submit.key)
            prefill._forget(submit.key)
            return scored(submit, (1, 2), (3, 1))

        prefill.on_submit = answer
        async with aclosing(one_by_one(rig.dispatcher.generate(asked))) as deltas:
            got = [delta async for delta in deltas]
    scores = tuple(logprobs_of(place) for place in (1, 2, 3))
    assert got == [TokenDelta((10,), "length", 0, (logprobs_of(10),), prompt_logprobs=scores)]


@pytest.mark.parametrize("lost", [False, True])
async def test_scoring_alone_needs_no_decode_node(lost: bool) -> None:
    """None is asked for room, a full one is no reason to wait, and one that is lost meanwhile was not needed."""
    asked = Generation((1, 2, 3, 4), SamplingParams(max_tokens=0, num_choices=2), num_prompt_logprobs=5)
    async with running_rig() as (rig, (prefill,), (decode,)):
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 5.0)]
        waiting = asyncio.create_task(rig.ask())
        await eventually(lambda: rig.entry(decode).refused_until_s > 0)
        decode.got.clear()

        def answer(submit: Submit) -> list[Message]:
            assert submit.ticket is None
            prefill._forget(submit.key)
            if lost:
                rig.switchboard.lost(decode.party)
            return [
                PromptLogprobs(submit.key, 1, tuple(map(logprobs_of, (1, 2, 3)))),
                Token0(submit.key, (), 0, 0.0, 0.0),
            ]

        prefill.on_submit = answer
        waiting.cancel()
        async with aclosing(one_by_one(rig.dispatcher.generate(asked))) as deltas:
            got = [delta async for delta in deltas]
        assert decode.count(Reserve) == decode.count(Commit) == 0
    scores = tuple(logprobs_of(place) for place in (1, 2, 3))
    assert got == [TokenDelta((), "length", 0, prompt_logprobs=scores), TokenDelta((), "length", choice=1)]


@pytest.mark.parametrize("parts", [((2, 1),), ((1, 1), (1, 1)), ((1, 1), (3, 1))], ids=["late", "twice", "gap"])
async def test_prompt_logprobs_with_a_gap_are_an_error(parts: tuple[tuple[int, int], ...]) -> None:
    asked = Generation((1, 2, 3, 4), SamplingParams(max_tokens=1), num_prompt_logprobs=0)
    async with running_rig() as (rig, (prefill,), _):
        prefill.on_submit = lambda submit: scored(submit, *parts)
        with pytest.raises(TransferError, match="out of order"):
            await anext(rig.dispatcher.generate(asked))
