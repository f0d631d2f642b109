"""What a plane reports. Events are facts about blocks; the owner of the plane decides what they mean."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BlocksArrived:
    """Receiver: these blocks of the ticket hold the sender's bytes; ``indexes`` are positions in its handles."""

    ticket_id: int
    indexes: tuple[int, ...]


@dataclass(frozen=True)
class BlocksSent:
    """Sender: the transport no longer reads these blocks, their buffers may be reused. Says nothing of arrival."""

    ticket_id: int
    indexes: tuple[int, ...]


@dataclass(frozen=True)
class PushFailed:
    """Sender: the push is over and forgotten, the transport reads none of its blocks any more.

    The missing blocks may be pushed again with the same ticket.
    """

    ticket_id: int
    reason: str


@dataclass(frozen=True)
class ReceiveFailed:
    """Receiver: a block of this ticket broke off on its way. The ticket stays open until it is withdrawn."""

    ticket_id: int
    reason: str


@dataclass(frozen=True)
class Withdrawn:
    """Receiver: no byte of this ticket can be written any more, its blocks may be freed. Comes once per ticket."""

    ticket_id: int


@dataclass(frozen=True)
class PushEnded:
    """Sender: the answer to ``cancel_push``: ``blocks_sent`` blocks went on the wire, no more will."""

    ticket_id: int
    blocks_sent: int


@dataclass(frozen=True)
class PeerLost:
    """A connection to this peer broke. A hint, it may repeat; the owner decides and says ``peer_dead``."""

    node_id: str
    epoch: int


Event = BlocksArrived | BlocksSent | PushFailed | ReceiveFailed | Withdrawn | PushEnded | PeerLost


class EventBox:
    """Thread-safe queue of events.

    `put` only queues, so a ledger may call it under its own lock and keep its events in order; `wake` then
    calls ``wakeup`` once, without any lock held, if something was put into an empty box. ``wakeup`` runs on
    whichever thread caused the event and must neither block nor raise.
    """

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._owes_wakeup = False

    def put(self, *events: Event) -> None:
        with self._lock:
            self._owes_wakeup = self._owes_wakeup or (not self._events and bool(events))
            for event in events:
                self._append(event)

    def wake(self) -> None:
        with self._lock:
            owed, self._owes_wakeup = self._owes_wakeup, False
        if owed:
            self._wakeup()

    def drain(self) -> list[Event]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def _append(self, event: Event) -> None:
        # Blocks arrive one by one; an owner that polls late should see one event, not a thousand.
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, BlocksArrived | BlocksSent)
            and isinstance(last, BlocksArrived | BlocksSent)
            and type(last) is type(event)
            and last.ticket_id == event.ticket_id
        ):
            self._events[-1] = type(event)(event.ticket_id, last.indexes + event.indexes)
        else:
            self._events.append(event)
