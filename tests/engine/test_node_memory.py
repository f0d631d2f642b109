"""Through two loops: the plane moves blocks between the memory of model and transport, where they are two."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cluster.wire import Party  # noqa: E402
from engine.instructions import CompleteTransfer, Expect, Instruction, NodeEvent, Push, TransferProgress  # noqa: E402
from engine.kv_cache import DeviceKVCache  # noqa: E402
from engine.node import NodeLoop  # noqa: E402
from kvtransfer.events import BlocksArrived  # noqa: E402
from kvtransfer.layout import BlockLayout  # noqa: E402
from kvtransfer.plane import KVPlane  # noqa: E402
from kvtransfer.regroup import Source, run_of  # noqa: E402
from kvtransfer.select import open_plane  # noqa: E402
from kvtransfer.ticket import BlockHandle  # noqa: E402

LAYOUT = BlockLayout("float32", 4, 2, 1, 8)
HANDLES = (BlockHandle(4, 1), BlockHandle(0, 1))


class Silence:
    """A channel on which nothing comes."""

    party = Party("node", 1, "tcp://127.0.0.1:1")

    async def receive(self) -> Any:
        await asyncio.Event().wait()


class Script:
    """A node state that gives its instructions at the first tick, and completes a ticket that has arrived."""

    def __init__(self, *instructions: Instruction) -> None:
        self.instructions = list(instructions)
        self.ticked = asyncio.Event()
        self.completed = asyncio.Event()
        self.arrived: set[int] = set()

    def handle(self, event: NodeEvent, now: float) -> list[Instruction]:
        match event:
            case TransferProgress(BlocksArrived(ticket_id, indexes)):
                self.arrived.update(indexes)
                if len(self.arrived) == len(HANDLES):
                    self.completed.set()
                    return [CompleteTransfer(ticket_id)]
        return []

    def tick(self, now: float) -> list[Instruction]:
        self.ticked.set()
        given, self.instructions = self.instructions, []
        return given

    def schedule(self, now: float) -> None:
        return None


class Node:
    def __init__(self, name: str, layout: BlockLayout = LAYOUT) -> None:
        self.cache = DeviceKVCache(layout, 6, torch.device("cpu"))
        self.loop = NodeLoop(None, self.cache, Silence())  # type: ignore[arg-type]
        identity = (name, 1, LAYOUT.fingerprint("weights", "tag"))
        wakeup = self.loop.wake_for_transfer
        self.plane: KVPlane = open_plane(
            ("inproc",),
            self.cache.as_bytes(),
            identity,
            secret=None,
            wakeup=wakeup,
            layout=layout,
            device=self.cache.device,
        )


async def moved(
    sender: Node, receiver: Node, items: tuple[tuple[int, Source], ...], zero_tail: tuple[int, int]
) -> None:
    """Two blocks of the receiver, through both loops."""
    expecting = Script(Expect(7, HANDLES, Party("p", 1, "tcp://127.0.0.1:2")))
    try:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(receiver.loop.run(expecting, receiver.plane))]  # type: ignore[arg-type]
            await expecting.ticked.wait()
            push = Push(receiver.plane.ticket(7, HANDLES), items, zero_tail)
            running.append(tasks.create_task(sender.loop.run(Script(push), sender.plane)))  # type: ignore[arg-type]
            await expecting.completed.wait()
            for task in running:
                task.cancel()
    finally:
        sender.plane.close()
        receiver.plane.close()


async def test_pushed_blocks_are_in_the_receivers_pool() -> None:
    sender, receiver = Node("p"), Node("d")
    sender.cache.pool.copy_(torch.randn(sender.cache.pool.shape))
    before = sender.cache.pool.clone()
    await moved(sender, receiver, ((0, 2), (1, 5)), (5, 3))
    before[5, :, :, :, 3:] = 0
    assert torch.equal(receiver.cache.pool[[4, 0]], before[[2, 5]])
    assert not receiver.cache.pool[[1, 2, 3, 5]].any()


async def test_blocks_of_another_size_are_cut_from_what_the_model_wrote() -> None:
    """The transport's twin of the sender's pool has every block that a receiver's block is cut from."""
    sender, receiver = Node("p"), Node("d", replace(LAYOUT, block_size=6))
    sender.cache.pool.copy_(torch.randn(sender.cache.pool.shape))
    table = [2, 5, 1]  # of eleven tokens
    await moved(sender, receiver, ((0, run_of(table, 0, 6, 4)), (1, run_of(table, 6, 11, 4))), (0, 4))
    tokens = torch.cat([sender.cache.pool[block_id] for block_id in table], dim=3)
    assert torch.equal(receiver.cache.pool[4], tokens[:, :, :, :6])
    assert torch.equal(receiver.cache.pool[0, :, :, :, :5], tokens[:, :, :, 6:11])
    assert not receiver.cache.pool[0, :, :, :, 5:].any()
