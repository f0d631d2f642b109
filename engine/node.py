"""The loop of every node: events in, instructions out, one step at a time.

All decisions run on the event loop's thread, so a node's state has one writer. The forward pass runs on its own
thread and never waits for the network; the KV plane has its own thread too and only wakes this one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from cluster.channel import Channel, ChannelError
from cluster.wire import PeerDown, Pong, RefusedPeer
from engine.instructions import (
    CancelPush,
    CompleteTransfer,
    DropPeer,
    Expect,
    FinishPush,
    Instruction,
    MessageArrived,
    NodeEvent,
    NodeState,
    Push,
    Send,
    StepFinished,
    TransferProgress,
    Withdraw,
)
from engine.step import FailedSequence, StepPlan, StepResult
from kvtransfer.errors import KVTransferError, PlaneBrokenError
from kvtransfer.events import PushFailed, ReceiveFailed, Withdrawn
from kvtransfer.plane import KVPlane

log = logging.getLogger(__name__)

TICK_S = 0.25


class LifeEndedError(Exception):
    """This life of this node is over: the cluster has dropped it for good, or its KV plane broke. It must start again
    under a new epoch.
    """


class Runner(Protocol):
    """Executes steps; the only thing here that computes."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. Blocks; called on the forward thread."""
        ...


class BlockMemory(Protocol):
    """The bytes of the KV pool."""

    def zero_tail(self, block_id: int, from_offset: int) -> None:
        """Zero the token slots of a block from ``from_offset`` on."""
        ...


class NodeLoop:
    """Drives one node's state. Owns the forward thread; borrows channel, plane, runner and memory."""

    def __init__(self, runner: Runner, memory: BlockMemory, channel: Channel) -> None:
        self._runner = runner
        self._memory = memory
        self._channel = channel
        self._parts: tuple[NodeState, KVPlane] | None = None
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._transfer_news = asyncio.Event()

    def wake_for_transfer(self) -> None:
        """The plane's ``wakeup``: called on its thread."""
        self._loop.call_soon_threadsafe(self._transfer_news.set)

    async def run(self, state: NodeState, plane: KVPlane) -> None:
        """Run until cancelled. ``plane`` was opened with this loop's :meth:`wake_for_transfer`."""
        self._parts = (state, plane)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward") as forward:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_messages())
                tasks.create_task(self._follow_transfers(plane))
                tasks.create_task(self._tick(state, plane))
                tasks.create_task(self._step(state, forward))

    async def _receive_messages(self) -> None:
        me = self._channel.party
        while True:
            envelope = await self._channel.receive()
            match envelope.body:
                case PeerDown(node_id, epoch) if (node_id, epoch) == (me.id, me.epoch):
                    raise LifeEndedError(f"{envelope.sender.id} gave this node up for dead")
                case _:
                    pass
            self._take_in(MessageArrived(envelope.sender, envelope.body))

    async def _follow_transfers(self, plane: KVPlane) -> None:
        while True:
            await self._transfer_news.wait()
            self._transfer_news.clear()
            for event in plane.poll():
                self._take_in(TransferProgress(event))

    async def _tick(self, state: NodeState, plane: KVPlane) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._perform(state.tick(time.monotonic()))
            try:
                plane.tick(time.monotonic())
            except PlaneBrokenError as error:
                raise LifeEndedError(str(error)) from error
            self._work.set()

    async def _step(self, state: NodeState, forward: ThreadPoolExecutor) -> None:
        while True:
            self._work.clear()
            plan = state.schedule(time.monotonic())
            if plan is None:
                await self._work.wait()
                continue
            result = await self._loop.run_in_executor(forward, self._execute, plan)
            self._take_in(StepFinished(result))

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            with self._running()[1].computing():
                return self._runner.execute(plan)
        except Exception:
            # A bug in one step must not take the node down: its requests fail, the next step starts clean.
            log.exception("a step of %d sequences failed", len(plan.chunks))
            message = "the engine failed while computing this request"
            failed = tuple(FailedSequence(chunk.key, message) for chunk in plan.chunks)
            return StepResult(tokens=(), failed=failed, seconds=0.0)

    def _take_in(self, event: NodeEvent) -> None:
        self._perform(self._running()[0].handle(event, time.monotonic()))
        self._work.set()

    def _perform(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            try:
                self._perform_one(instruction)
            except ChannelError as error:
                # The peer's own deadline ends the exchange; nothing here may wait for a full queue.
                log.warning("message dropped: %s", error)
            except KVTransferError as error:
                self._transfer_refused(instruction, error)

    def _perform_one(self, instruction: Instruction) -> None:
        _state, plane = self._running()
        match instruction:
            case Send(peer, Pong() as pong):
                self._channel.send(peer, msgspec.structs.replace(pong, refused_peers=_refused_peers(plane)))
            case Send(peer, message):
                self._channel.send(peer, message)
            case Push(ticket, items, zero_tail):
                if zero_tail is not None:
                    self._memory.zero_tail(*zero_tail)
                plane.push(ticket, items)
            case Expect(ticket_id, handles, sender):
                plane.expect(ticket_id, handles, sender=(sender.id, sender.epoch))
            case CompleteTransfer(ticket_id):
                plane.complete(ticket_id)
            case FinishPush(ticket_id):
                plane.finish_push(ticket_id)
            case CancelPush(ticket_id):
                plane.cancel_push(ticket_id)
            case Withdraw(ticket_id, blocks_sent):
                plane.withdraw(ticket_id, blocks_sent=blocks_sent)
            case DropPeer(node_id, epoch):
                plane.peer_dead(node_id, epoch)

    def _running(self) -> tuple[NodeState, KVPlane]:
        if self._parts is None:
            raise RuntimeError("the loop is not running")
        return self._parts

    def _transfer_refused(self, instruction: Instruction, error: KVTransferError) -> None:
        log.warning("the KV plane refused %s: %s", type(instruction).__name__, error)
        match instruction:
            case Push(ticket):
                self._take_in(TransferProgress(PushFailed(ticket.ticket_id, str(error))))
            case Expect(ticket_id):
                self._take_in(TransferProgress(ReceiveFailed(ticket_id, str(error))))
                # The plane never knew the ticket: nothing can land, and no report of its own will follow.
                self._take_in(TransferProgress(Withdrawn(ticket_id)))
            case _:
                pass


def _refused_peers(plane: KVPlane) -> tuple[RefusedPeer, ...]:
    return tuple(RefusedPeer(peer.node_id, peer.epoch, why) for peer, why in plane.refused().items())
