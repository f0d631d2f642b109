"""Nodes without room: who waits, who goes first, and who is told that it will never fit."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import ContextLengthError, NoUsablePairError, OverloadedError
from cluster.wire import Cancel, Failed, Message, Pong, Refused, Reserve, Submit
from tests.cluster.redis_server import eventually
from tests.router_dispatch.rig import answer, running_rig, silent


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


async def test_the_line_goes_on_when_a_refusal_has_passed_even_if_nothing_else_happens() -> None:
    async with running_rig() as (rig, (prefill,), (decode,)):
        for node in (prefill, decode):
            node.muted.add(Pong)
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 0.05)] if reserve.key.attempt < 4 else None
        assert await rig.ask() == answer()


async def test_a_retry_has_patience_of_its_own() -> None:
    """The first attempt took longer than anybody would wait in the line; that is no reason for a 429."""
    async with running_rig(max_wait_s=1.0) as (rig, (prefill,), (decode,)):
        silent(prefill)
        loop = asyncio.get_running_loop()
        late = loop.time() + 1.0
        asking = asyncio.create_task(rig.ask())
        await eventually(lambda: prefill.count(Submit) and loop.time() > late)
        decode.on_reserve = lambda reserve: [Refused(reserve.key, "full", 0.05)] if reserve.key.attempt < 4 else None
        (key,) = decode.granted
        prefill.on_submit = lambda _submit: None
        prefill.send(rig.channel.party, Failed(key, "transfer_failed", "x"))
        assert await asking == answer()
