"""Several answers to one prompt, through real channels: one dispatch, ended choice by choice."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import ContextLengthError, InvalidRequestError, NoUsablePairError
from cluster.request import SamplingParams
from cluster.wire import Cancel, CancelChoice, Commit, Message, Refused, Reserve, Submit
from router.generation import Endings, Generation, TokenDelta
from router.policy import Candidate, Demand, NoPair, Placement, place
from tests.cluster.redis_server import eventually
from tests.router_dispatch.fake_nodes import token
from tests.router_dispatch.rig import LIMIT_S, Rig, one_by_one, running_rig

PROMPT = (1, 2, 3)


def wanted(num_choices: int, max_tokens: int = 4) -> Generation:
    return Generation(PROMPT, SamplingParams(max_tokens=max_tokens, num_choices=num_choices))


async def ask(rig: Rig, generation: Generation) -> list[TokenDelta]:
    async with asyncio.timeout(LIMIT_S), aclosing(one_by_one(rig.dispatcher.generate(generation))) as deltas:
        return [delta async for delta in deltas]


def answers(deltas: list[TokenDelta], num_choices: int) -> list[list[int]]:
    return [[i for delta in deltas if delta.choice == choice for i in delta.token_ids] for choice in range(num_choices)]


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
@pytest.mark.parametrize("num_choices", [2, 3, 32])
async def test_one_dispatch_gives_all_choices(num_choices: int, max_tokens: int) -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):
        got = await ask(rig, wanted(num_choices, max_tokens))
        assert (prefill.count(Submit), decode.count(Reserve)) == (1, 1)
        assert decode.count(Commit) == (1 if max_tokens > 1 else 0)
        await rig.settle()
        assert decode.count(Cancel) == 0
    assert [delta.choice for delta in got[:num_choices]] == list(range(num_choices))
    assert [delta.cached_tokens for delta in got] == [0] + [None] * (len(got) - 1)
    assert answers(got, num_choices) == [
        [token(PROMPT, index, choice) for index in range(max_tokens)] for choice in range(num_choices)
    ]
    assert [delta.choice for delta in got if delta.finish_reason] == list(range(num_choices))


@pytest.mark.parametrize("at_token_0", [True, False])
async def test_a_choice_the_reader_ends_is_ended_on_the_decode_node_alone(at_token_0: bool) -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        endings, ended, got = Endings(), False, []
        async with (
            asyncio.timeout(LIMIT_S),
            aclosing(one_by_one(rig.dispatcher.generate(wanted(3, 60), endings))) as deltas,
        ):
            async for delta in deltas:
                if delta.choice == 1 and ended:
                    continue  # it came together with the one before
                got.append(delta)
                if delta.choice == 1 and at_token_0 == (delta.cached_tokens is None and len(got) == 2):
                    endings.add(1)
                    ended = True
        await eventually(lambda: decode.count(CancelChoice) == 1)
        (told,) = [message for message in decode.got if isinstance(message, CancelChoice)]
        assert told.choice == 1
        await rig.settle()
        assert decode.count(Cancel) == 1, "the end of a choice that was cut is made sure of"
    sizes = [len(answer) for answer in answers(got, 3)]
    # Long enough that not all of it is there when the reader says so.
    assert sizes == [60, 1 if at_token_0 else 2, 60]


async def test_the_last_choice_the_reader_ends_cancels_the_dispatch() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        decode.stop_after = 1
        endings = Endings()
        async with (
            asyncio.timeout(LIMIT_S),
            aclosing(one_by_one(rig.dispatcher.generate(wanted(2, 6), endings))) as deltas,
        ):
            async for delta in deltas:
                endings.add(delta.choice)
        await rig.settle()
        assert decode.count(Cancel) == 1


@pytest.mark.parametrize("num_read", [1, 2, 3, 5, 8])
async def test_leaving_cancels_all_choices(num_read: int) -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):
        decode.stop_after = 3
        async with asyncio.timeout(LIMIT_S), aclosing(one_by_one(rig.dispatcher.generate(wanted(3, 9)))) as deltas:
            got = [await anext(deltas) for _ in range(num_read)]
        assert len(got) == num_read
        await rig.settle()
        assert decode.count(Cancel) == prefill.count(Cancel) == 1


async def test_more_than_the_decode_node_could_ever_hold_is_refused() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):

        def never(reserve: Reserve) -> list[Message]:
            return [Refused(reserve.key, "3 choices are over 2 slots", None, InvalidRequestError.code)]

        decode.on_reserve = never
        with pytest.raises(InvalidRequestError, match="3 choices") as refused:
            await ask(rig, wanted(3))
        assert not isinstance(refused.value, ContextLengthError), "a shorter prompt would not help"
        decode.on_reserve = lambda _reserve: None
        with pytest.raises(NoUsablePairError):
            await ask(rig, wanted(100, 200))  # 64 blocks of 4 tokens


async def test_how_long_each_answer_may_be() -> None:
    """A pool of 64 blocks of 4; the prompt's full blocks are there once."""
    async with running_rig() as (rig, _prefills, _decodes):
        longest = rig.dispatcher.max_answer_tokens
        assert longest(4, 3) == 21 * 4 + 1  # 63 blocks for three
        assert longest(6, 3) == 21 * 4 - 2 + 1
        assert longest(6, 1) == 256 - 6
        for prompt_len, num_choices in ((4, 3), (6, 3), (7, 2), (5, 60)):
            most = longest(prompt_len, num_choices)
            assert most is not None
            party = rig.nodes[0].party
            node = Candidate(party, "layout", 4, 256, total_blocks=64)
            for more, fits in ((0, True), (1, False)):
                demand = Demand(prompt_len, prompt_len + most + more - 1, num_choices)
                assert isinstance(place(demand, [node], [node], {}), Placement if fits else NoPair)
