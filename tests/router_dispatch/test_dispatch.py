"""One request's way through real channels: the answer, and every way it can end without one."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing

import pytest

from cluster.errors import (
    BatonError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    TransferError,
    WorkerLostError,
)
from cluster.prefix_hash import block_hashes
from cluster.request import FinishReason, RequestKey
from cluster.wire import (
    Cancel,
    Commit,
    Failed,
    FirstToken,
    Message,
    Pong,
    Reserve,
    Submit,
    Token0,
    TokenItem,
    Tokens,
)
from router.dispatch import DispatchSettings
from tests.cluster.redis_server import eventually
from tests.router_dispatch.fake_nodes import FakeNode, token
from tests.router_dispatch.rig import Rig, answer, generation, one_by_one, running_rig, silent

SHORT = DispatchSettings(reserve_timeout_s=0.05, token0_timeout_s=0.1, token_timeout_s=0.1)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 40])
async def test_the_answer_comes_in_order(max_tokens: int) -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        assert await rig.ask(max_tokens=max_tokens) == answer(max_tokens=max_tokens)
        await rig.settle()
        assert decode.count(Cancel) == 0, "what has ended is not cancelled"
        assert decode.count(Commit) == (1 if max_tokens > 1 else 0)


@pytest.mark.parametrize("block_sizes", [(4, 8), (8, 4), (3, 5)])
async def test_each_node_gets_the_prompts_names_in_blocks_of_its_own_size(block_sizes: tuple[int, int]) -> None:
    prompt = tuple(range(17))
    async with running_rig(block_sizes=block_sizes) as (rig, (prefill,), (decode,)):
        assert await rig.ask(prompt, 3) == answer(prompt, 3)
        submit = next(message for message in prefill.got if isinstance(message, Submit))
        reserve = next(message for message in decode.got if isinstance(message, Reserve))
        assert submit.block_hashes == block_hashes(reserve.seed_hash, prompt, block_sizes[0])
        assert reserve.block_hashes == block_hashes(reserve.seed_hash, prompt, block_sizes[1])


async def test_many_at_once_get_their_own_answers() -> None:
    async with running_rig(num_prefill=2, num_decode=2) as (rig, prefills, decodes):
        prompts = [(i, i + 1, 7) for i in range(60)]
        got = await asyncio.gather(*(rig.ask(prompt, 3 + i % 9) for i, prompt in enumerate(prompts)))
        assert got == [answer(prompt, 3 + i % 9) for i, prompt in enumerate(prompts)]
        assert all(node.count(Submit) for node in prefills)
        assert all(node.count(Reserve) for node in decodes)


async def test_a_decode_token_before_token_0_waits_for_it() -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):

        def commit_first(submit: Submit) -> list[Message]:
            item = TokenItem(submit.key, 1, (token(submit.prompt_token_ids, 1),), "length")
            decode.send(rig.channel.party, Tokens(1, (item,)))
            decode._forget(submit.key)
            prefill._forget(submit.key)
            return []

        prefill.on_submit = commit_first
        asking = asyncio.create_task(rig.ask(max_tokens=2))
        await eventually(lambda: prefill.count(Submit))
        key = next(message.key for message in prefill.got if isinstance(message, Submit))
        await eventually(lambda: rig.switchboard._open[key]._mail == deque() and prefill.count(Submit))
        prefill.send(rig.channel.party, Token0(key, (FirstToken(0, token((1, 2, 3), 0), None),), 0, 0.0, 0.0))
        assert await asking == answer(max_tokens=2)


async def test_no_answer_to_reserve_is_tried_once_more_elsewhere() -> None:
    async with running_rig(num_decode=2, settings=SHORT) as (rig, _prefills, decodes):
        silent(decodes[0])
        assert await rig.ask() == answer()
        assert (decodes[0].count(Reserve), decodes[1].count(Reserve)) == (1, 1)


async def test_no_token_0_in_time_is_an_error_without_retry() -> None:
    async with running_rig(settings=SHORT) as (rig, (prefill,), _decodes):
        silent(prefill)
        with pytest.raises(DeadlineError):
            await rig.ask()
        assert prefill.count(Submit) == 1


async def test_no_next_token_in_time_is_an_error() -> None:
    async with running_rig(settings=SHORT) as (rig, _prefills, (decode,)):
        decode.stop_after = 2
        with pytest.raises(DeadlineError):
            await rig.ask()


@pytest.mark.parametrize(
    ("code", "error", "num_submits"),
    [
        ("transfer_failed", TransferError, 2),
        ("worker_lost", WorkerLostError, 2),
        ("timeout", DeadlineError, 1),
        ("engine_error", EngineError, 1),
        ("context_length_exceeded", ContextLengthError, 1),
        ("no such code", EngineError, 1),
    ],
)
async def test_what_a_prefill_node_reports(code: str, error: type[BatonError], num_submits: int) -> None:
    async with running_rig() as (rig, (prefill,), _decodes):
        prefill.on_submit = lambda submit: [Failed(submit.key, code, "it says why")]
        with pytest.raises(error, match="it says why"):
            await rig.ask()
        assert prefill.count(Submit) == num_submits


async def test_a_failure_reported_once_is_not_seen_by_the_client() -> None:
    async with running_rig() as (rig, (prefill,), _decodes):

        def fail_once(submit: Submit) -> list[Message] | None:
            return [Failed(submit.key, "transfer_failed", "x")] if submit.key.attempt == 1 else None

        prefill.on_submit = fail_once
        assert await rig.ask() == answer()


async def test_a_gap_in_the_tokens_is_an_error() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        decode.skip_token = 3
        got = []
        async with aclosing(one_by_one(rig.dispatcher.generate(generation(max_tokens=9)))) as deltas:
            with pytest.raises(TransferError):
                await _read_into(got, deltas)
        assert got == answer(max_tokens=3)


@pytest.mark.parametrize("finish", [None, "length"])
async def test_what_came_before_a_failure_counts_and_what_follows_the_finish_does_not(
    finish: FinishReason | None,
) -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        decode.stop_after = 0
        got: list[int] = []
        async with aclosing(one_by_one(rig.dispatcher.generate(generation(max_tokens=3)))) as deltas:
            got.extend((await anext(deltas)).token_ids)
            await eventually(lambda: decode.count(Commit))
            (mailbox,) = rig.switchboard._open.values()
            for mail in (TokenItem(mailbox.key, 1, (7,), None), TokenItem(mailbox.key, 2, (8,), finish)):
                mailbox.put(mail)
            mailbox.put(Failed(mailbox.key, "transfer_failed", "x"))
            if finish is None:
                with pytest.raises(TransferError):
                    await _read_into(got, deltas)
            else:
                await _read_into(got, deltas)
                await eventually(lambda: decode.count(Commit) == 1)
                decode._forget(mailbox.key)
        assert got == [*answer(max_tokens=1), 7, 8]


async def test_messages_from_nodes_without_a_part_are_not_taken() -> None:
    async with running_rig(num_prefill=2, num_decode=2) as (rig, prefills, decodes):
        decodes[0].stop_after = 0
        asking = asyncio.create_task(rig.ask(max_tokens=3))
        await eventually(lambda: decodes[0].count(Commit))
        (key,) = decodes[0].granted
        router = rig.channel.party
        for liar in (prefills[0], prefills[1], decodes[1]):
            liar.send(router, Tokens(1, (TokenItem(key, 1, (666,), None),)))
        for liar in (prefills[1], decodes[1]):
            liar.send(router, Failed(key, "engine_error", "a lie"))
            liar.send(router, Pong(77, rig.entry(liar).load))
        await _pinged(rig, prefills[1], decodes[1], prefills[0])
        for index, finish in ((1, None), (2, "length")):
            item = TokenItem(key, index, (token((1, 2, 3), index),), finish)  # type: ignore[arg-type]
            decodes[0].send(router, Tokens(1, (item,)))
        decodes[0]._forget(key)
        assert await asking == answer(max_tokens=3)


async def test_a_node_that_works_for_nobody_is_told_to_stop() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        unknown = RequestKey(generation().sampling and "nobody", 1)  # type: ignore[arg-type]
        decode.held.add(unknown)
        decode.send(rig.channel.party, Tokens(1, (TokenItem(unknown, 4, (1,), None),)))
        await eventually(lambda: decode.count(Cancel) and not decode.held)


async def _read_into(got: list[int], deltas: object) -> None:
    async for delta in deltas:  # type: ignore[attr-defined]
        got.extend(delta.token_ids)


async def _pinged(rig: Rig, *nodes: FakeNode) -> None:
    """Everything these nodes had sent before is here: each has answered a ping since."""
    marks = {node: rig.entry(node).heard_s for node in nodes}
    await eventually(lambda: all(rig.entry(node).heard_s > mark for node, mark in marks.items()))
