"""One request's way through real channels: the answer, and every way it can end without one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import (
    BatonError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    NoUsablePairError,
    OverloadedError,
    TransferError,
    WorkerLostError,
)
from cluster.request import RequestKey
from cluster.wire import Cancel, Commit, Failed, Message, Pong, Refused, Reserve, Submit, Token0, TokenItem, Tokens
from router import mailbox as mailbox_module
from router.dispatch import DispatchSettings
from tests.cluster.redis_server import eventually
from tests.router_dispatch.fake_nodes import FakeDecode, FakeNode, FakePrefill, token
from tests.router_dispatch.rig import Rig, answer, generation, running_rig

SHORT = DispatchSettings(reserve_timeout_s=0.05, token0_timeout_s=0.1, token_timeout_s=0.1)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 40])
async def test_the_answer_comes_in_order(max_tokens: int) -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        assert await rig.ask(max_tokens=max_tokens) == answer(max_tokens=max_tokens)
        await rig.settle()
        assert decode.count(Cancel) == 0, "what has ended is not cancelled"
        assert decode.count(Commit) == (1 if max_tokens > 1 else 0)


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
        await eventually(lambda: rig.switchboard._open[key]._mail.empty() and prefill.count(Submit))
        prefill.send(rig.channel.party, Token0(key, token((1, 2, 3), 0), None, 0, 0.0, 0.0))
        assert await asking == answer(max_tokens=2)


# --- refusals ---


async def test_a_refusal_is_waited_out() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        refusals = 3

        def refuse(reserve: Reserve) -> list[Message] | None:
            nonlocal refusals
            refusals -= 1
            return [Refused(reserve.key, "full", 0.0)] if refusals >= 0 else None

        decode.on_reserve = refuse
        assert await rig.ask() == answer()
        keys = [message.key for message in decode.got if isinstance(message, Reserve)]
        assert [key.attempt for key in keys] == [1, 2, 3, 4], "every Reserve is a dispatch of its own"
        assert decode.count(Cancel) == 0, "a refusal leaves nothing to cancel"


async def test_a_refusal_that_never_ends_is_a_context_length_error() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "too long for this node", None)]
        with pytest.raises(ContextLengthError, match="too long"):
            await rig.ask()
        assert decode.count(Reserve) == 1


async def test_a_node_that_refuses_for_ever_ends_in_429_and_is_not_asked_all_the_time() -> None:
    async with running_rig(max_wait_s=0.3) as (rig, _prefills, (decode,)):
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 0.0)]
        with pytest.raises(OverloadedError) as caught:
            await rig.ask()
        assert caught.value.retry_after_s
        assert 1 < decode.count(Reserve) < 30, "at most every 50 ms, whatever the node says"


async def test_another_node_is_asked_when_one_refuses() -> None:
    async with running_rig(num_decode=2) as (rig, _prefills, (full, free)):
        full.on_reserve = lambda reserve: [Refused(reserve.key, "full", 5.0)]
        for _ in range(3):
            assert await rig.ask() == answer()
        assert full.count(Reserve) == 1
        assert free.count(Reserve) == 3


async def test_nobody_overtakes_a_large_request_at_the_head() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        decode.max_tokens_held = 30
        decode.stop_after = 2
        running = asyncio.create_task(rig.ask((1,), 20))
        await eventually(lambda: len(decode.granted) == 1)
        large = asyncio.create_task(rig.ask((2,), 30))
        await eventually(lambda: decode.count(Reserve) == 2)
        small = [asyncio.create_task(rig.ask((3, i), 2)) for i in range(5)]  # there is room for each of them now
        await eventually(lambda: decode.count(Reserve) >= 4)
        assert len(decode.granted) == 1
        running.cancel()
        decode.stop_after = None
        assert await large == answer((2,), 30)
        assert await asyncio.gather(*small) == [answer((3, i), 2) for i in range(5)]
        first = next(m for m in decode.got if isinstance(m, Reserve) and m.sampling.max_tokens == 30)
        assert decode.granted[1].request_id == first.key.request_id


async def test_a_request_that_no_living_node_can_hold_blocks_nobody() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        with pytest.raises(NoUsablePairError, match="length"):
            await rig.ask(range(1000), 5)
        assert await rig.ask() == answer()
        assert decode.count(Reserve) == 1


async def test_the_line_is_full() -> None:
    async with running_rig(max_waiting=2) as (rig, _prefills, (decode,)):
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 5.0)]
        waiting = [asyncio.create_task(rig.ask()) for _ in range(2)]
        await eventually(lambda: len(rig.line) == 2)
        with pytest.raises(OverloadedError):
            await rig.ask()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# --- lost nodes ---


def _silent(node: FakeNode) -> None:
    if isinstance(node, FakeDecode):
        node.on_reserve = lambda _reserve: []
    elif isinstance(node, FakePrefill):
        node.on_submit = lambda _submit: []


@pytest.mark.parametrize("end", ["suspect", "bury"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("phase", ["reserving", "before token 0"])
async def test_a_node_lost_before_token_0_costs_one_retry(
    phase: str, role: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "RESEND_S", 0.05)
    async with running_rig(num_prefill=2, num_decode=2) as (rig, prefills, decodes):
        _silent((decodes if phase == "reserving" else prefills)[0])
        asking = asyncio.create_task(rig.ask())
        await eventually(lambda: decodes[0].count(Reserve) if phase == "reserving" else prefills[0].count(Submit))
        lost: FakeNode = prefills[0] if role == "prefill" else decodes[0]
        getattr(rig, end)(lost)
        decodes[0].on_reserve = prefills[0].on_submit = lambda _message: None
        assert await asking == answer()
        if end == "suspect":
            lost.deaf = False  # it comes back, hears its cancels and answers them
            await eventually(lambda: rig.entry(lost).usable)
            assert await rig.ask() == answer()


async def test_two_losses_are_an_error() -> None:
    async with running_rig(num_prefill=3) as (rig, prefills, _decodes):
        for prefill in prefills:
            _silent(prefill)
        asking = asyncio.create_task(rig.ask())
        for prefill in prefills[:2]:
            await eventually(lambda p=prefill: p.count(Submit))  # type: ignore[misc]
            rig.bury(prefill)
        with pytest.raises(WorkerLostError):
            await asking
        assert prefills[2].count(Submit) == 0


async def test_a_decode_node_lost_between_tokens_is_an_error_and_no_retry() -> None:
    async with running_rig(num_decode=2) as (rig, _prefills, (decode, other)):
        decode.stop_after = 2
        got = []
        async with aclosing(rig.dispatcher.generate(generation(max_tokens=9))) as deltas:
            for _ in range(3):
                got.extend((await anext(deltas)).token_ids)
            rig.suspect(decode)
            with pytest.raises(WorkerLostError):
                await anext(deltas)
        assert got == answer(max_tokens=3)
        assert other.count(Reserve) == 0
        assert len(rig.switchboard) == 1, "not forgotten: it may come back and go on"
        decode.deaf = False
        await eventually(lambda: decode.count(Cancel))


@pytest.mark.parametrize("num_tokens", [1, 2])
async def test_a_prefill_node_lost_after_token_0_is_not_missed(num_tokens: int) -> None:
    """From then on the decode node knows whether it has everything, and says so if not."""
    async with running_rig() as (rig, (prefill,), (decode,)):
        decode.stop_after = num_tokens - 1
        async with aclosing(rig.dispatcher.generate(generation(max_tokens=4))) as deltas:
            got = [token_id for _ in range(num_tokens) for token_id in (await anext(deltas)).token_ids]
            (key,) = decode.granted
            await eventually(lambda: decode.count(Commit))
            rig.bury(prefill)
            for index in range(num_tokens, 4):
                item = TokenItem(key, index, (token((1, 2, 3), index),), "length" if index == 3 else None)
                decode.send(rig.channel.party, Tokens(index, (item,)))
            decode._forget(key)
            async for delta in deltas:
                got.extend(delta.token_ids)
        assert got == answer(max_tokens=4)


async def test_a_node_lost_after_the_finish_is_nothing() -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):
        assert await rig.ask() == answer()
        rig.bury(prefill)
        rig.bury(decode)
        assert len(rig.switchboard) == 0
        with pytest.raises(NoUsablePairError):
            await rig.ask()


async def test_a_node_lost_between_placement_and_reserve_is_not_asked() -> None:
    """The line chose it, it was lost, and only then did the request's own coroutine get its turn."""
    async with running_rig(num_prefill=2) as (rig, (first, second), (decode,)):
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 5.0)]
        asking = asyncio.create_task(rig.ask())
        await eventually(lambda: len(rig.line) == 1)
        decode.on_reserve = lambda _reserve: None
        rig.entry(decode).refused_until_s = 0.0
        rig.line.pump()
        assert rig.entry(first).own_tokens > 0
        rig.bury(first)
        assert await asking == answer()
        assert (first.count(Submit), second.count(Submit), decode.count(Reserve)) == (0, 1, 2)


async def test_a_restarted_node_with_the_same_name_is_another_node() -> None:
    async with running_rig() as (rig, (prefill,), (old,)):
        _silent(prefill)
        asking = asyncio.create_task(rig.ask())
        await eventually(lambda: prefill.count(Submit))
        old.deaf = True
        rig.nodes.remove(old)
        async with FakeDecode("decode-0") as new:
            prefill.on_submit = lambda _submit: None
            await rig.join(new)
            assert await asking == answer()
            old.deaf = False
            old.send(rig.channel.party, Pong(1, rig.entry(new).load))
            assert rig.dead == [old.party]
            assert await rig.ask() == answer()
            await rig.settle()
            rig.bury(new)


# --- what goes wrong on a node that lives ---


async def test_no_answer_to_reserve_is_tried_once_more_elsewhere() -> None:
    async with running_rig(num_decode=2, settings=SHORT) as (rig, _prefills, decodes):
        _silent(decodes[0])
        assert await rig.ask() == answer()
        assert (decodes[0].count(Reserve), decodes[1].count(Reserve)) == (1, 1)


async def test_no_token_0_in_time_is_an_error_without_retry() -> None:
    async with running_rig(settings=SHORT) as (rig, (prefill,), _decodes):
        _silent(prefill)
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
        async with aclosing(rig.dispatcher.generate(generation(max_tokens=9))) as deltas:
            with pytest.raises(TransferError):
                await _read_into(got, deltas)
        assert got == answer(max_tokens=3)


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
