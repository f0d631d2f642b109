"""The life of one transfer, on the sending and on the receiving side. Pure: the clock is an argument.

A ledger keeps the books (which blocks wait, are posted, landing or arrived); what a transfer may still do, and how it
ended, is decided here, by one table a side. Every transfer ends ``done``, ``failed`` or ``cancelled``.

Deadlines. While a transfer is wanted its owner watches over it, with the request's own deadline, and cancels or
withdraws it. From then on it only drains: what the transport has in hand is on its way and cannot be called back.
A peer that is slow gets :data:`DRAIN_S` for that; then the transport is told to end it by force (`KVPlane.fence`).
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Generic, TypeVar

from cluster.transitions import Life, TransitionTable

DRAIN_S: Final = 20.0


class SendState(Enum):
    """``closing``: no further chunk will come. ``cancelling``, ``failing``: only what is posted still goes out."""

    SENDING = "sending"
    CLOSING = "closing"
    CANCELLING = "cancelling"
    FAILING = "failing"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ReceiveState(Enum):
    """``broken``: a block broke off, another sender may still bring it. ``withdrawing``, ``giving_up``: what lands
    now is unwanted; only the second had lost a block before.
    """

    EXPECTED = "expected"
    RECEIVING = "receiving"
    BROKEN = "broken"
    WITHDRAWING = "withdrawing"
    GIVING_UP = "giving_up"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


SEND: Final = TransitionTable(
    "kv send",
    SendState.SENDING,
    {
        SendState.SENDING: (SendState.CLOSING, SendState.CANCELLING, SendState.FAILING),
        SendState.CLOSING: (SendState.DONE, SendState.CANCELLING, SendState.FAILING),
        SendState.FAILING: (SendState.FAILED, SendState.CANCELLING),
        SendState.CANCELLING: (SendState.CANCELLED,),
        SendState.DONE: (),
        SendState.CANCELLED: (),
        SendState.FAILED: (),
    },
)
RECEIVE: Final = TransitionTable(
    "kv receive",
    ReceiveState.EXPECTED,
    {
        ReceiveState.EXPECTED: (ReceiveState.RECEIVING, ReceiveState.WITHDRAWING),
        ReceiveState.RECEIVING: (ReceiveState.DONE, ReceiveState.BROKEN, ReceiveState.WITHDRAWING),
        ReceiveState.BROKEN: (ReceiveState.DONE, ReceiveState.GIVING_UP),
        ReceiveState.WITHDRAWING: (ReceiveState.CANCELLED,),
        ReceiveState.GIVING_UP: (ReceiveState.FAILED,),
        ReceiveState.DONE: (),
        ReceiveState.CANCELLED: (),
        ReceiveState.FAILED: (),
    },
)

# What each draining state ends as, once the transport has nothing of it in hand.
_SEND_ENDS: Final = {SendState.CANCELLING: SendState.CANCELLED, SendState.FAILING: SendState.FAILED}
_RECEIVE_ENDS: Final = {
    ReceiveState.WITHDRAWING: ReceiveState.CANCELLED,
    ReceiveState.GIVING_UP: ReceiveState.FAILED,
}
OUTCOMES: Final = ("done", "cancelled", "failed")

S = TypeVar("S", bound=Enum)


class _Session(Generic[S]):
    """``began_s`` is when the first block could move."""

    def __init__(self, table: TransitionTable[S], ends: dict[S, S], now: float) -> None:
        self._life = Life(table, now)
        self._ends = ends
        self._draining = tuple(ends)  # asked for every block, and an Enum hashes slowly
        self._forced = False
        self.began_s = now

    @property
    def state(self) -> S:
        """Where in its life the transfer is."""
        return self._life.state

    @property
    def is_over(self) -> bool:
        """True once nothing of it can happen any more."""
        return self._life.is_final

    @property
    def is_draining(self) -> bool:
        """True while it is unwanted and waits for what the transport has in hand."""
        return self.state in self._draining

    def must_be_forced(self, now: float) -> bool:
        """True once, when it has been draining for too long."""
        overdue = self.is_draining and not self._forced and now - self._life.entered_s > DRAIN_S
        self._forced = self._forced or overdue
        return overdue

    def _drained(self, now: float) -> bool:
        if self.is_draining:
            self._life.move(self._ends[self.state], now)
        return self.is_over


class SendSession(_Session[SendState]):
    """One push. It ends with `settle`, when nothing of it is posted."""

    def __init__(self, now: float) -> None:
        super().__init__(SEND, _SEND_ENDS, now)

    @property
    def takes_blocks(self) -> bool:
        """True while chunks may be added."""
        return self.state is SendState.SENDING

    def finish(self, now: float) -> None:
        """No further chunk will come."""
        if self.state is SendState.SENDING:
            self._life.move(SendState.CLOSING, now)

    def cancel(self, now: float) -> bool:
        """The owner wants no more of it to be sent. Returns whether this is news; it outranks a failure."""
        news = self.state not in (SendState.CANCELLING, SendState.CANCELLED)
        if news:
            self._life.move(SendState.CANCELLING, now)
        return news

    def fail(self, now: float) -> bool:
        """Its transport cannot go on. Returns whether this is news."""
        news = self.state in (SendState.SENDING, SendState.CLOSING)
        if news:
            self._life.move(SendState.FAILING, now)
        return news

    def settle(self, num_waiting: int, num_posted: int, now: float) -> bool:
        """Whether it is over, given what still waits and what the transport has in hand."""
        if num_posted:
            return False
        if self.state is SendState.CLOSING and not num_waiting:
            self._life.move(SendState.DONE, now)
        return self._drained(now)


class ReceiveSession(_Session[ReceiveState]):
    """One ticket's blocks. It ends with `complete`, or with `settle` when nothing can land any more."""

    def __init__(self, now: float) -> None:
        super().__init__(RECEIVE, _RECEIVE_ENDS, now)

    def claimed(self, now: float) -> None:
        """A block is landing."""
        if self.state is ReceiveState.EXPECTED:
            self.began_s = now
            self._life.move(ReceiveState.RECEIVING, now)

    def broke_off(self, now: float) -> bool:
        """A block did not arrive. Returns whether the owner must hear of it: not if it wants none any more."""
        if self.state is ReceiveState.RECEIVING:
            self._life.move(ReceiveState.BROKEN, now)
        return not self.is_draining

    def withdraw(self, now: float) -> None:
        """The owner takes its consent back. Idempotent."""
        if self.state is ReceiveState.BROKEN:
            self._life.move(ReceiveState.GIVING_UP, now)
        elif not self.is_draining:
            self._life.move(ReceiveState.WITHDRAWING, now)

    def complete(self, now: float) -> None:
        """The owner has every block."""
        self._life.move(ReceiveState.DONE, now)

    def settle(self, num_landing: int, now: float) -> bool:
        """Whether it is over, given how many blocks may still be written."""
        return not num_landing and self._drained(now)
