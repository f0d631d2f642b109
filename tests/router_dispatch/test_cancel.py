"""Clients that leave, at any moment: both nodes are told, and nothing of the request stays anywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from cluster.errors import BatonError
from cluster.wire import Cancel, Cancelled, Granted, Refused, Reserve, Submit
from router import mailbox as mailbox_module
from tests.cluster.redis_server import eventually
from tests.router_dispatch.fake_nodes import FakeDecode, FakePrefill
from tests.router_dispatch.rig import Rig, answer, generation, one_by_one, running_rig

Asking = asyncio.Task[list[int]]
Phase = Callable[[Rig, FakePrefill, FakeDecode], Awaitable[Asking]]


async def _waiting(rig: Rig, prefill: FakePrefill, decode: FakeDecode) -> Asking:
    decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 5.0)]
    asking = asyncio.create_task(rig.ask())
    await eventually(lambda: len(rig.line) == 1)
    return asking


async def _reserving(rig: Rig, prefill: FakePrefill, decode: FakeDecode) -> Asking:
    decode.on_reserve = lambda _reserve: []
    asking = asyncio.create_task(rig.ask())
    await eventually(lambda: decode.count(Reserve))
    return asking


async def _prefilling(rig: Rig, prefill: FakePrefill, decode: FakeDecode) -> Asking:
    prefill.on_submit = lambda _submit: []
    asking = asyncio.create_task(rig.ask())
    await eventually(lambda: prefill.count(Submit))
    return asking


@pytest.mark.parametrize("phase", [_waiting, _reserving, _prefilling], ids=lambda phase: phase.__name__)
async def test_a_client_that_leaves_before_token_0(phase: Phase) -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):
        asking = await phase(rig, prefill, decode)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        if phase is not _waiting:
            await eventually(lambda: prefill.count(Cancel) and decode.count(Cancel))
        await rig.settle()
        prefill.on_submit = decode.on_reserve = lambda _message: None
        rig.entry(decode).refused_until_s = 0.0
        assert await rig.ask() == answer()


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_a_generator_closed_between_tokens(num_tokens: int) -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):
        decode.stop_after = 3
        async with aclosing(one_by_one(rig.dispatcher.generate(generation(max_tokens=9)))) as deltas:
            for _ in range(num_tokens):
                await anext(deltas)
        assert len(rig.switchboard) == 1, "remembered until both have confirmed"
        assert all((e.own_requests, e.own_tokens) == (0, 0) for e in rig.registry.all_nodes())
        await eventually(lambda: prefill.count(Cancel) and decode.count(Cancel))
        await rig.settle()


async def test_a_generator_closed_after_its_finish_cancels_nothing() -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):
        async with aclosing(one_by_one(rig.dispatcher.generate(generation(max_tokens=2)))) as deltas:
            await anext(deltas)
            assert (await anext(deltas)).finish_reason == "length"
        await rig.settle()
        assert prefill.count(Cancel) == decode.count(Cancel) == 0


async def test_a_generator_that_was_never_read() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        await rig.dispatcher.generate(generation()).aclose()
        assert decode.count(Reserve) == 0


async def test_a_client_that_leaves_when_it_has_just_been_placed() -> None:
    """Cancelled in the same turn of the loop in which the line chose nodes for it: the booking is given back."""
    async with running_rig() as (rig, _prefills, (decode,)):
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 5.0)]
        asking = [asyncio.create_task(rig.ask()) for _ in range(2)]
        await eventually(lambda: len(rig.line) == 2)
        decode.on_reserve = lambda _reserve: None
        rig.entry(decode).refused_until_s = 0.0
        rig.line.pump()
        assert len(rig.line) == 0
        assert rig.entry(decode).own_requests == 2
        asking[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking[0]
        assert await asking[1] == answer()


async def test_cancels_are_repeated_until_they_are_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "RESEND_S", 0.02)
    async with running_rig() as (rig, (prefill,), (decode,)):
        prefill.on_submit = lambda _submit: []
        prefill.muted.add(Cancelled)
        asking = asyncio.create_task(rig.ask())
        await eventually(lambda: prefill.count(Submit))
        asking.cancel()
        await eventually(lambda: prefill.count(Cancel) >= 3)
        assert len(rig.switchboard) == 1
        assert decode.count(Cancel) == 1, "it has confirmed"
        prefill.muted.clear()


async def test_a_node_that_never_confirms_is_given_up_at_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mailbox_module, "RESEND_S", 0.01)
    monkeypatch.setattr(mailbox_module, "MAX_RESENDS", 3)
    async with running_rig() as (rig, (prefill,), _decodes):
        prefill.on_submit = lambda _submit: []
        prefill.muted.add(Cancelled)
        asking = asyncio.create_task(rig.ask())
        await eventually(lambda: prefill.count(Submit))
        asking.cancel()
        await eventually(lambda: len(rig.switchboard) == 0)
        assert prefill.count(Cancel) == 3
        assert any("gave up" in line and "prefill-0" in line for line in caplog.messages)


async def test_a_dead_node_is_not_waited_for() -> None:
    """Neither if it died before the client left nor after."""
    async with running_rig(num_prefill=2) as (rig, (first, second), (decode,)):
        decode.stop_after = 1
        for prefill in (first, second):
            async with aclosing(one_by_one(rig.dispatcher.generate(generation()))) as deltas:
                await anext(deltas)
                await anext(deltas)
                if prefill is first:
                    rig.bury(first)
            if prefill is second:
                second.muted.add(Cancelled)
                rig.bury(second)
            await eventually(lambda: len(rig.switchboard) == 0)
        assert first.count(Cancel) == 0


async def test_a_grant_that_comes_too_late_is_taken_back() -> None:
    async with running_rig() as (rig, _prefills, (decode,)):
        decode.on_reserve = lambda _reserve: []
        asking = asyncio.create_task(rig.ask())
        await eventually(lambda: decode.count(Reserve))
        reserve = next(message for message in decode.got if isinstance(message, Reserve))
        asking.cancel()
        await eventually(lambda: len(rig.switchboard) == 0)
        cancels = decode.count(Cancel)
        decode.on_reserve = lambda _reserve: None
        decode._on_message(rig.channel.party, reserve)
        assert decode.held
        await eventually(lambda: decode.count(Cancel) > cancels)
        assert not any(isinstance(message, Granted) for message in decode.got)


@pytest.mark.parametrize("seed", range(4))
async def test_fifty_at_once_of_whom_many_leave(seed: int) -> None:
    """Whoever stays gets the right answer; `running_rig` checks that nothing is left."""
    rng = random.Random(seed)
    async with running_rig(num_prefill=2, num_decode=2) as (rig, _prefills, decodes):
        for decode in decodes:
            decode.max_tokens_held = 60  # a few at a time: most wait or are refused
        asking = {(i, seed): asyncio.create_task(rig.ask((i, seed), 2 + i % 12)) for i in range(50)}
        leaving = rng.sample(sorted(asking), 25)
        for prompt in leaving:
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            asking[prompt].cancel()
        got = await asyncio.gather(*asking.values(), return_exceptions=True)
        for (prompt, task), result in zip(asking.items(), got, strict=True):
            if task.cancelled():
                assert prompt in leaving
            else:
                assert result == answer(prompt, 2 + prompt[0] % 12)


async def test_fifty_at_once_while_nodes_go() -> None:
    """Every request gets the right answer or an error that says what happened."""
    async with running_rig(num_prefill=3, num_decode=3) as (rig, prefills, decodes):
        asking = {i: asyncio.create_task(rig.ask((i,), 30)) for i in range(50)}
        await eventually(lambda: len(decodes[0].granted) >= 3)
        rig.bury(decodes[0])
        await eventually(lambda: prefills[0].count(Submit) >= 5)
        rig.bury(prefills[0])
        got = await asyncio.gather(*asking.values(), return_exceptions=True)
        for i, result in zip(asking, got, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, BatonError)
                assert result.retryable
            else:
                assert result == answer((i,), 30)
        assert await rig.ask() == answer()
