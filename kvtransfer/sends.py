"""The sending half's book: which blocks of which ticket wait, are posted to the transport, or were sent.

A block goes queued -> posted (`take`) -> `sent` | `lost`. A push ends when nothing of it is posted: with
`PushEnded` if it was cancelled, with `PushFailed` if its transport failed, silently if it was finished. Until
then the transport may be reading the blocks, so no end is reported early.

Thread-safe: the owner's thread submits and cancels, the transport's thread takes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvtransfer.errors import TicketError
from kvtransfer.events import BlocksSent, EventBox, PushEnded, PushFailed
from kvtransfer.ticket import BlockHandle, PeerId, TransferTicket

# Enough to answer a late cancel of any push a node can have had in the last minute.
_REMEMBERED: Final = 4096


@dataclass(frozen=True)
class PushItem:
    """Local block ``block_id`` goes to position ``index`` of the ticket, into the receiver's ``handle``."""

    index: int
    block_id: int
    handle: BlockHandle


@dataclass(eq=False)
class Push:
    """One ticket being sent. Transports read ``ticket``, ``peer`` and ``scheme``; the rest is the ledger's.

    Except ``digests``, by index: it belongs to the thread of the transport.
    """

    ticket: TransferTicket
    scheme: str
    queue: deque[PushItem] = field(default_factory=deque)
    seen: set[int] = field(default_factory=set)
    posted: set[int] = field(default_factory=set)
    digests: dict[int, int] = field(default_factory=dict)
    num_sent: int = 0
    cancelled: bool = False
    finished: bool = False
    failure: str | None = None
    over: bool = False

    @property
    def ticket_id(self) -> int:
        return self.ticket.ticket_id

    @property
    def peer(self) -> PeerId:
        return self.ticket.hello.peer

    @property
    def address(self) -> bytes:
        """Of the receiver, on this push's scheme."""
        return self.ticket.hello.addresses[self.scheme]


@dataclass(frozen=True)
class _Ended:
    num_sent: int
    may_resume: bool


class SendLedger:
    """Reads no memory itself. The caller of `submit` keeps each block unchanged until it is sent or the push ends."""

    def __init__(self, num_blocks: int, events: EventBox) -> None:
        self._num_blocks = num_blocks
        self._events = events
        self._lock = threading.Lock()
        self._pushes: dict[int, Push] = {}
        self._ended: OrderedDict[int, _Ended] = OrderedDict()
        self.blocks_sent = 0

    @property
    def open_pushes(self) -> int:
        return len(self._pushes)

    def submit(self, ticket: TransferTicket, scheme: str, items: Sequence[tuple[int, int]]) -> Push:
        """Queue blocks. All or nothing: raises `TicketError` for a bad index or block, or a push that ended."""
        with self._lock:
            push = self._pushes.get(ticket.ticket_id)
            if push is None:
                ended = self._ended.get(ticket.ticket_id)
                if ended is not None and not ended.may_resume:
                    raise TicketError(f"the push of ticket {ticket.ticket_id} has ended")
                push = Push(ticket, scheme, num_sent=ended.num_sent if ended else 0)
            elif push.ticket != ticket:
                raise TicketError(f"ticket {ticket.ticket_id} differs from the one being pushed")
            if push.cancelled or push.finished or push.failure is not None:
                raise TicketError(f"the push of ticket {ticket.ticket_id} is ending")
            checked = self._checked(push, items)
            if checked:
                self._pushes[ticket.ticket_id] = push
            push.seen.update(item.index for item in checked)
            push.queue.extend(checked)
            return push

    def cancel(self, ticket_id: int) -> None:
        """Send nothing more. `PushEnded` follows, at once or when the posted blocks are out; also if unknown."""
        with self._lock:
            push = self._pushes.get(ticket_id)
            if push is None:
                ended = self._ended.pop(ticket_id, _Ended(0, False))
                self._remember(ticket_id, ended.num_sent, may_resume=False)
                self._events.put(PushEnded(ticket_id, ended.num_sent))
            elif not push.cancelled:
                push.cancelled = True
                push.queue.clear()
                self._settle(push)
        self._events.wake()

    def finish(self, ticket_id: int) -> None:
        """Forget the push once everything queued is sent. Idempotent; unknown is fine."""
        with self._lock:
            push = self._pushes.get(ticket_id)
            if push is not None:
                push.finished = True
                self._settle(push)
        self._events.wake()

    def take(self, push: Push) -> PushItem | None:
        """The next block to post, or None. The transport owes `sent` or `lost` for it."""
        with self._lock:
            if not push.queue:
                return None
            item = push.queue.popleft()
            push.posted.add(item.index)
            return item

    def waiting(self, push: Push, limit: int | None = None) -> list[PushItem]:
        """What `take` will give next, in that order; the owner may cancel it meanwhile."""
        with self._lock:
            return list(islice(push.queue, limit))

    def sent(self, push: Push, *indexes: int) -> None:
        """The transport has read these blocks for the last time."""
        with self._lock:
            for index in indexes:
                push.posted.remove(index)
            push.num_sent += len(indexes)
            self.blocks_sent += len(indexes)
            self._events.put(BlocksSent(push.ticket_id, indexes))
            self._settle(push)
        self._events.wake()

    def lost(self, push: Push, index: int) -> None:
        """The block was posted, went perhaps partly, and is not read any more."""
        with self._lock:
            push.posted.remove(index)
            self._settle(push)
        self._events.wake()

    def fail(self, push: Push, reason: str) -> None:
        """Its transport cannot go on. `PushFailed` follows when nothing is posted."""
        with self._lock:
            if not push.over and push.failure is None:
                push.failure = reason
                push.queue.clear()
                self._settle(push)
        self._events.wake()

    def pushes_to(self, peer: PeerId, scheme: str) -> list[Push]:
        with self._lock:
            return [push for push in self._pushes.values() if push.peer == peer and push.scheme == scheme]

    def all_pushes(self) -> list[Push]:
        with self._lock:
            return list(self._pushes.values())

    def _checked(self, push: Push, items: Sequence[tuple[int, int]]) -> list[PushItem]:
        handles = push.ticket.handles
        fresh: set[int] = set()
        checked = []
        for index, block_id in items:
            if not 0 <= index < len(handles):
                raise TicketError(f"index {index} is outside a ticket of {len(handles)} blocks")
            if index in push.seen or index in fresh:
                raise TicketError(f"index {index} was pushed before")
            if not 0 <= block_id < self._num_blocks:
                raise TicketError(f"block {block_id} is outside a pool of {self._num_blocks}")
            fresh.add(index)
            checked.append(PushItem(index, block_id, handles[index]))
        return checked

    def _settle(self, push: Push) -> None:
        if push.over or push.posted:
            return
        if push.cancelled:
            self._events.put(PushEnded(push.ticket_id, push.num_sent))
        elif push.failure is not None:
            self._events.put(PushFailed(push.ticket_id, push.failure))
        elif not push.finished or push.queue:
            return
        push.over = True
        del self._pushes[push.ticket_id]
        resumes = push.failure is not None and not push.cancelled
        self._remember(push.ticket_id, push.num_sent, may_resume=resumes)

    def _remember(self, ticket_id: int, num_sent: int, *, may_resume: bool) -> None:
        self._ended[ticket_id] = _Ended(num_sent, may_resume)
        self._ended.move_to_end(ticket_id)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
