"""The sending half's book: which blocks of which ticket wait, are posted to the transport, or were sent.

A block goes queued -> posted (`take`) -> `sent` | `lost`. Whether a push goes on and how it ends is decided by its
`kvtransfer.session`: with `PushEnded` if it was cancelled, with `PushFailed` if its transport failed, silently if it
was finished. Until nothing of it is posted the transport may be reading the blocks, so no end is reported early.

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
from kvtransfer.meter import TransferMeter
from kvtransfer.regroup import Bytes, Source, TokenRun
from kvtransfer.session import SendSession, SendState
from kvtransfer.ticket import BlockHandle, PeerId, TransferTicket

# Enough to answer a late cancel of any push a node can have had in the last minute.
_REMEMBERED: Final = 4096


@dataclass(slots=True)
class PushItem:
    """Local block ``block_id`` goes to position ``index`` of the ticket, into the receiver's ``handle``.

    With a ``run`` the receiver's blocks have another size: these tokens go there, the first of them in ``block_id``.
    Never changed; not frozen only because making a frozen one takes three times as long, and there is one a block.
    """

    index: int
    block_id: int
    handle: BlockHandle
    run: TokenRun | None = None


@dataclass(eq=False)
class Push:
    """One ticket being sent. Transports read ``ticket``, ``peer`` and ``scheme``; the rest is the ledger's.

    Except ``digests`` and ``staged`` (blocks put together already), by index: they belong to the transport's thread.
    """

    ticket: TransferTicket
    scheme: str
    session: SendSession
    queue: deque[PushItem] = field(default_factory=deque)
    seen: set[int] = field(default_factory=set)
    posted: set[int] = field(default_factory=set)
    digests: dict[int, int] = field(default_factory=dict)
    staged: dict[int, Bytes] = field(default_factory=dict)
    num_sent: int = 0
    failure: str = ""

    @property
    def over(self) -> bool:
        """Nothing of it is read any more."""
        return self.session.is_over

    @property
    def ticket_id(self) -> int:
        return self.ticket.ticket_id

    @property
    def peer(self) -> PeerId:
        return self.ticket.hello.peer

    @property
    def block_bytes(self) -> int:
        """Of the receiver's blocks: what goes out for each item."""
        return self.ticket.hello.block_bytes

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

    def __init__(self, num_blocks: int, events: EventBox, meter: TransferMeter | None = None) -> None:
        self._num_blocks = num_blocks
        self._events = events
        self._meter = meter or TransferMeter()
        self._lock = threading.Lock()
        self._pushes: dict[int, Push] = {}
        self._ended: OrderedDict[int, _Ended] = OrderedDict()
        self.blocks_sent = 0
        self.bytes_sent = 0

    @property
    def open_pushes(self) -> int:
        return len(self._pushes)

    def submit(self, ticket: TransferTicket, scheme: str, items: Sequence[tuple[int, Source]]) -> Push:
        """Queue blocks. All or nothing: raises `TicketError` for a bad index or block, or a push that ended."""
        with self._lock:
            push = self._pushes.get(ticket.ticket_id)
            if push is None:
                ended = self._ended.get(ticket.ticket_id)
                if ended is not None and not ended.may_resume:
                    raise TicketError(f"the push of ticket {ticket.ticket_id} has ended")
                session = SendSession(self._meter.now())
                push = Push(ticket, scheme, session, num_sent=ended.num_sent if ended else 0)
            elif push.ticket != ticket:
                raise TicketError(f"ticket {ticket.ticket_id} differs from the one being pushed")
            if not push.session.takes_blocks:
                raise TicketError(f"the push of ticket {ticket.ticket_id} is ending")
            checked = self._checked(push, items)
            if checked:
                self._pushes[ticket.ticket_id] = push
            push.seen.update(item.index for item in checked)
            push.queue.extend(checked)
            self._meter.moving(len(checked))
            return push

    def cancel(self, ticket_id: int) -> None:
        """Send nothing more. `PushEnded` follows, at once or when the posted blocks are out; also if unknown."""
        with self._lock:
            push = self._pushes.get(ticket_id)
            if push is None:
                ended = self._ended.pop(ticket_id, _Ended(0, False))
                self._remember(ticket_id, ended.num_sent, may_resume=False)
                self._events.put(PushEnded(ticket_id, ended.num_sent))
            elif push.session.cancel(self._meter.now()):
                self._clear(push)
                self._settle(push)
        self._events.wake()

    def finish(self, ticket_id: int) -> None:
        """Forget the push once everything queued is sent. Idempotent; unknown is fine."""
        with self._lock:
            push = self._pushes.get(ticket_id)
            if push is not None:
                push.session.finish(self._meter.now())
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
                self._give_back(push, index)
            push.num_sent += len(indexes)
            self.blocks_sent += len(indexes)
            self.bytes_sent += push.block_bytes * len(indexes)
            self._events.put(BlocksSent(push.ticket_id, indexes))
            self._settle(push)
        self._events.wake()

    def lost(self, push: Push, index: int) -> None:
        """The block was posted, went perhaps partly, and is not read any more."""
        with self._lock:
            self._give_back(push, index)
            self._settle(push)
        self._events.wake()

    def fail(self, push: Push, reason: str) -> None:
        """Its transport cannot go on. `PushFailed` follows when nothing is posted."""
        with self._lock:
            if push.session.fail(self._meter.now()):
                push.failure = reason
                self._clear(push)
                self._settle(push)
        self._events.wake()

    def pushes_to(self, peer: PeerId, scheme: str) -> list[Push]:
        with self._lock:
            return [push for push in self._pushes.values() if push.peer == peer and push.scheme == scheme]

    def overdue(self, now: float) -> set[PeerId]:
        """Peers that have kept an unwanted push from ending for too long. Each push is reported once."""
        with self._lock:
            return {push.peer for push in self._pushes.values() if push.session.must_be_forced(now)}

    def all_pushes(self) -> list[Push]:
        with self._lock:
            return list(self._pushes.values())

    def _checked(self, push: Push, items: Sequence[tuple[int, Source]]) -> list[PushItem]:
        handles = push.ticket.handles
        fresh: set[int] = set()
        checked = []
        for index, source in items:
            run = source if isinstance(source, TokenRun) else None
            block_id = source.block_ids[0] if isinstance(source, TokenRun) else source
            if not 0 <= index < len(handles):
                raise TicketError(f"index {index} is outside a ticket of {len(handles)} blocks")
            if index in push.seen or index in fresh:
                raise TicketError(f"index {index} was pushed before")
            if not 0 <= block_id < self._num_blocks:
                raise TicketError(f"block {block_id} is outside a pool of {self._num_blocks}")
            fresh.add(index)
            checked.append(PushItem(index, block_id, handles[index], run))
        return checked

    def _clear(self, push: Push) -> None:
        self._meter.moving(-len(push.queue))
        push.queue.clear()

    def _give_back(self, push: Push, index: int) -> None:
        push.posted.remove(index)
        self._meter.moving(-1)

    def _settle(self, push: Push) -> None:
        now = self._meter.now()
        if push.over or not push.session.settle(len(push.queue), len(push.posted), now):
            return
        state = push.session.state
        if state is SendState.CANCELLED:
            self._events.put(PushEnded(push.ticket_id, push.num_sent))
        elif state is SendState.FAILED:
            self._events.put(PushFailed(push.ticket_id, push.failure))
        del self._pushes[push.ticket_id]
        self._meter.ended("send", state.value, now - push.session.began_s)
        self._remember(push.ticket_id, push.num_sent, may_resume=state is SendState.FAILED)

    def _remember(self, ticket_id: int, num_sent: int, *, may_resume: bool) -> None:
        self._ended[ticket_id] = _Ended(num_sent, may_resume)
        self._ended.move_to_end(ticket_id)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
