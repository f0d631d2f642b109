"""Nodes lost in every phase of a request: one retry before the first token, an error after it, and no loose ends."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.errors import NoUsablePairError, WorkerLostError
from cluster.wire import Cancel, Commit, Pong, Refused, Reserve, Submit, TokenItem, Tokens
from router import mailbox as mailbox_module
from tests.cluster.redis_server import eventually
from tests.router_dispatch.fake_nodes import FakeDecode, FakeNode, token
from tests.router_dispatch.rig import answer, generation, one_by_one, running_rig, silent


@pytest.mark.parametrize("end", ["suspect", "bury"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("phase", ["reserving", "before token 0"])
async def test_a_node_lost_before_token_0_costs_one_retry(
    phase: str, role: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "RESEND_S", 0.05)
    async with running_rig(num_prefill=2, num_decode=2) as (rig, prefills, decodes):
        silent((decodes if phase == "reserving" else prefills)[0])
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
            silent(prefill)
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
        async with aclosing(one_by_one(rig.dispatcher.generate(generation(max_tokens=9)))) as deltas:
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
        async with aclosing(one_by_one(rig.dispatcher.generate(generation(max_tokens=4)))) as deltas:
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
        silent(prefill)
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
