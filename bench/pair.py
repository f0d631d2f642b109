"""A prefill and a decode node in one process, with everything real but the model: loops, pools, planes, channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from cluster.channel import Channel
from cluster.config import ClusterConfig, new_epoch
from decode_node.reservation import DecodeSettings
from decode_node.scheduler import DecodeState
from engine.block_pool import BlockPool
from engine.instructions import NodeState
from engine.kv_cache import KVCache
from engine.node import NodeLoop
from engine.step import SampledToken, StepPlan, StepResult
from kvtransfer.layout import BlockLayout
from kvtransfer.select import open_plane
from kvtransfer.ticket import new_ticket_id
from prefill_node.admission import PrefillSettings
from prefill_node.scheduler import PrefillState

FINGERPRINT = "bench"
MAX_MODEL_LEN = 512
TOKEN = 7


def layout(block_size: int) -> BlockLayout:
    """4 KiB a token: 64 KiB in a block of 16."""
    return BlockLayout("float32", block_size, num_layers=4, num_kv_heads=2, head_dim=64)


class Parrot:
    """A runner that fills the blocks a step writes and always samples the same token."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def execute(self, plan: StepPlan) -> StepResult:
        """See :class:`engine.node.Runner`."""
        size, tokens = self._cache.layout.block_size, []
        for chunk in plan.chunks:
            for index in range(chunk.start // size, -(-chunk.position // size)):
                self._cache.pool[chunk.block_table[index]] = float(chunk.position)
            if chunk.sampling is not None:
                tokens.append(SampledToken(chunk.key, TOKEN))
        return StepResult(tuple(tokens), (), 0.0)


class BenchNode:
    """One node; ``state`` decides, ``pool`` keeps the books.

    With ``-mapped`` behind its scheme a prefill node shares its pool, as real ones do.
    """

    def __init__(self, role: str, channel: Channel, scheme: str, block_size: int, num_blocks: int) -> None:
        self.party, self.block_size = channel.party, block_size
        self.pool = BlockPool(num_blocks)
        scheme, _, sharing = scheme.partition("-")
        cache = KVCache(layout(block_size), num_blocks, shared=bool(sharing) and role == "prefill")
        self._loop = NodeLoop(Parrot(cache), cache, channel)
        self.plane = open_plane(
            [scheme],
            cache.as_bytes(),
            (self.party.id, self.party.epoch, FINGERPRINT),
            secret=None,
            wakeup=self._loop.wake_for_transfer,
            layout=cache.layout,
            memory=cache.memory,
        )
        self.state: NodeState
        if role == "prefill":
            self.state = PrefillState(
                self.pool, PrefillSettings(block_size, num_blocks, 128, 16, MAX_MODEL_LEN, FINGERPRINT)
            )
        else:
            settings = DecodeSettings(block_size, num_blocks, 64, MAX_MODEL_LEN, FINGERPRINT)
            self.state = DecodeState(self.pool, settings, self.party, self.plane.hello, new_ticket_id)

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._loop.run(self.state, self.plane)


@asynccontextmanager
async def bench_pair(
    scheme: str, block_sizes: tuple[int, int] = (16, 16), num_blocks: int = 1024
) -> AsyncIterator[tuple[Channel, BenchNode, BenchNode]]:
    """(the router's channel, prefill node, decode node), the nodes running."""
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        router, *channels = [await stack.enter_async_context(Channel(_config(name))) for name in ("R", "P", "D")]
        sizes = zip(("prefill", "decode"), channels, block_sizes, strict=True)
        nodes = [BenchNode(role, channel, scheme, size, num_blocks) for role, channel, size in sizes]
        running = [asyncio.create_task(node.run()) for node in nodes]
        try:
            yield router, nodes[0], nodes[1]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for node in nodes:
                await asyncio.to_thread(node.plane.close)


def _config(name: str) -> ClusterConfig:
    return ClusterConfig(name, new_epoch(), "redis://127.0.0.1:1", "127.0.0.1", "127.0.0.1", None)
