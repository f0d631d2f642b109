"""What goes into a node's state and what comes out of it.

A node's decisions are pure: ``handle(event, now)`` and ``tick(now)`` return instructions, ``schedule(now)`` returns
the next step. Only the loop in :mod:`engine.node` performs instructions, and their results come back as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.wire import Message, NodeLoad, Party
from engine.block_pool import BlockReport
from engine.step import StepPlan, StepResult
from kvtransfer.events import Event as TransferEvent
from kvtransfer.regroup import Source
from kvtransfer.ticket import BlockHandle, TransferTicket


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A control message from another process."""

    sender: Party
    body: Message


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """The KV plane reports."""

    event: TransferEvent


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The step that ``schedule`` planned has been executed."""

    result: StepResult


NodeEvent = MessageArrived | TransferProgress | StepFinished


@dataclass(frozen=True, slots=True)
class Send:
    """Tell another process."""

    peer: Party
    message: Message


@dataclass(frozen=True, slots=True)
class Expect:
    """Consent to receive these blocks from that life of the prefill node (before its ticket is sent)."""

    ticket_id: int
    handles: tuple[BlockHandle, ...]
    sender: Party


@dataclass(frozen=True, slots=True)
class Push:
    """Hand blocks to the transport: ``items`` are (index in the ticket, local block id, or tokens of local blocks).

    ``zero_tail`` = (block id, first unused slot): the slots from there on are zeroed first, so that bytes of an
    earlier request never leave the node.
    """

    ticket: TransferTicket
    items: tuple[tuple[int, Source], ...]
    zero_tail: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class CancelPush:
    """Stop sending; the plane answers ``PushEnded``."""

    ticket_id: int


@dataclass(frozen=True, slots=True)
class FinishPush:
    """All blocks were sent and acknowledged; the plane may forget the ticket."""

    ticket_id: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """No longer receive; the plane answers ``Withdrawn`` once no byte can land any more."""

    ticket_id: int
    blocks_sent: int | None


@dataclass(frozen=True, slots=True)
class CompleteTransfer:
    """All blocks arrived; the plane may forget the ticket."""

    ticket_id: int


@dataclass(frozen=True, slots=True)
class DropPeer:
    """That life of that node is over: drop its connections at once."""

    node_id: str
    epoch: int


Instruction = Send | Expect | Push | CancelPush | FinishPush | Withdraw | CompleteTransfer | DropPeer


class NodeState(Protocol):
    """A node's decisions, without clock, socket or tensor. ``now`` is in seconds of one monotonic clock."""

    def handle(self, event: NodeEvent, now: float) -> list[Instruction]:
        """Take in what happened."""
        ...

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. Not called again before its StepFinished."""
        ...

    def tick(self, now: float) -> list[Instruction]:
        """End what is past its deadline."""
        ...

    def load(self) -> NodeLoad:
        """For the router's placement."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotone counters and gauges for ``/metrics``, by metric name."""
        ...

    def check(self) -> tuple[BlockReport, ...]:
        """Blocks held in the name of a request that does not exist or does not know of them. Always empty."""
        ...

    def report(self) -> list[dict[str, str | int | float]]:
        """Every live request for ``/debug/kv``: key, state, age, deadline, blocks."""
        ...
