"""A dispatcher with everything behind it, in one event loop with the fake nodes it talks to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from cluster.channel import Channel
from cluster.config import ClusterConfig, new_epoch
from cluster.membership import NodeRecord
from cluster.request import SamplingParams
from cluster.wire import Party, Pong
from router import registry as registry_module
from router.dispatch import Dispatcher, DispatchSettings
from router.generation import Generation, TokenDelta
from router.mailbox import Switchboard
from router.naming import PromptNames
from router.placement import Placer
from router.policy import Candidate
from router.queue import WaitingLine
from router.registry import Node, NodeRegistry
from tests.cluster.redis_server import eventually
from tests.router_dispatch.fake_nodes import BLOCK_SIZE, FakeDecode, FakeNode, FakePrefill, token

LIMIT_S = 20.0


class NoIndex:
    """No node is known to hold any prefix."""

    def cached_tokens(self, node: Candidate, names: PromptNames) -> int:
        return 0


class NoMembership:
    """The test says which nodes there are."""

    async def read(self) -> dict[str, NodeRecord]:
        return {}


class Rig:
    """The router's side of one test, and its fake nodes."""

    def __init__(self, channel: Channel, settings: DispatchSettings, max_waiting: int, max_wait_s: float) -> None:
        self.channel = channel
        self.nodes: list[FakeNode] = []
        self.lost: list[Party] = []
        self.dead: list[Party] = []
        self.switchboard = Switchboard(channel)
        self.registry = NodeRegistry(
            NoMembership(),  # type: ignore[arg-type]
            channel,
            on_lost=self._on_lost,
            on_dead=self._on_dead,
            on_change=self._pump,
        )
        self.placer = Placer(self.registry, NoIndex())  # type: ignore[arg-type]
        self.line = WaitingLine(
            self.placer.try_place, self.placer.release, max_waiting=max_waiting, max_wait_s=max_wait_s
        )
        self.dispatcher = Dispatcher(self.switchboard, self.placer, self.line, settings)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self.registry.run())
            tasks.create_task(self.switchboard.resend())

    async def _receive(self) -> None:
        while True:
            envelope = await self.channel.receive()
            match envelope.body:
                case Pong():
                    self.registry.on_pong(envelope.sender, envelope.body, time.monotonic())
                case _:
                    self.switchboard.deliver(envelope.sender, envelope.body)

    def _pump(self) -> None:
        self.line.pump()

    def _on_lost(self, party: Party) -> None:
        self.lost.append(party)
        self.switchboard.lost(party)

    def _on_dead(self, party: Party) -> None:
        self.dead.append(party)
        self.switchboard.dead(party)

    async def join(self, *nodes: FakeNode) -> None:
        """Wait until the router may use them."""
        self.nodes.extend(nodes)
        self.registry.take_records([node.record for node in nodes], time.monotonic())
        await eventually(lambda: all(self.entry(node).usable for node in nodes))

    def entry(self, node: FakeNode) -> Node:
        found = self.registry.get(node.party)
        assert found is not None
        return found

    def silence(self, node: FakeNode, seconds: float) -> None:
        """As if nothing had been heard of ``node`` for that long; it hears nothing from now on."""
        node.deaf = True
        self.entry(node).heard_s = time.monotonic() - seconds
        self.registry.check_silence(time.monotonic())

    def suspect(self, node: FakeNode) -> None:
        self.silence(node, registry_module.SUSPECT_AFTER_S + 0.1)

    def bury(self, node: FakeNode) -> None:
        self.silence(node, registry_module.DEAD_AFTER_S + 0.1)
        self.nodes.remove(node)

    async def ask(self, prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 5) -> list[int]:
        """Everything one request gives; checks that nothing follows the finish."""
        wanted = generation(prompt, max_tokens)
        async with asyncio.timeout(LIMIT_S), aclosing(self.dispatcher.generate(wanted)) as batches:
            got = [delta async for deltas in batches for delta in deltas]
        assert [delta.finish_reason for delta in got] == [None] * (len(got) - 1) + ["length"]
        return [token_id for delta in got for token_id in delta.token_ids]

    async def settle(self) -> None:
        """Everything has been given back: on the router, and on every node that is there."""
        await eventually(lambda: len(self.switchboard) == 0)
        assert len(self.line) == 0
        for entry in self.registry.all_nodes():
            assert (entry.own_requests, entry.own_tokens, entry.probing) == (0, 0, False), entry
        await eventually(lambda: all(not node.held for node in self.nodes if not node.deaf))


async def one_by_one(batches: AsyncGenerator[Sequence[TokenDelta], None]) -> AsyncGenerator[TokenDelta, None]:
    """The same deltas each alone, whatever came together; closes ``batches``."""
    async with aclosing(batches):
        async for deltas in batches:
            for delta in deltas:
                yield delta


def generation(prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 5) -> Generation:
    return Generation(tuple(prompt), SamplingParams(max_tokens=max_tokens))


def answer(prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 5) -> list[int]:
    """What :meth:`Rig.ask` must give."""
    prompt = tuple(prompt)
    return [token(prompt, index) for index in range(max_tokens)]


def silent(node: FakeNode) -> None:
    """From now on it takes requests and says nothing about them."""
    if isinstance(node, FakeDecode):
        node.on_reserve = lambda _reserve: []
    elif isinstance(node, FakePrefill):
        node.on_submit = lambda _submit: []


@asynccontextmanager
async def running_rig(
    *,
    settings: DispatchSettings | None = None,
    num_prefill: int = 1,
    num_decode: int = 1,
    max_waiting: int = 100,
    max_wait_s: float = LIMIT_S,
    block_sizes: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE),
) -> AsyncIterator[tuple[Rig, list[FakePrefill], list[FakeDecode]]]:
    """A router and its nodes, ready; at the end nothing may be left of any request.

    ``block_sizes`` are the prefill and the decode nodes'.
    """
    config = ClusterConfig("router", new_epoch(), "redis://unused", "127.0.0.1", "127.0.0.1", None)
    prefills = [FakePrefill(f"prefill-{i}", block_size=block_sizes[0]) for i in range(num_prefill)]
    decodes = [FakeDecode(f"decode-{i}", block_size=block_sizes[1]) for i in range(num_decode)]
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(Channel(config))
        for node in (*prefills, *decodes):
            await stack.enter_async_context(node)
        rig = Rig(channel, settings or DispatchSettings(), max_waiting, max_wait_s)
        running = asyncio.create_task(rig.run())
        try:
            await rig.join(*prefills, *decodes)
            yield rig, prefills, decodes
            await rig.settle()
        finally:
            if running.done():
                running.result()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
