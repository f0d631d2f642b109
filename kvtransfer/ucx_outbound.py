"""The sending end of the UCX road: one endpoint to one worker of a peer, and the window of bytes in flight."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import numpy as np

from kvtransfer.events import PeerLost
from kvtransfer.pacing import unpace_all
from kvtransfer.road import RoadContext
from kvtransfer.routes import Route, satisfies
from kvtransfer.sends import Push, PushItem
from kvtransfer.ticket import INDEX_BITS
from kvtransfer.ucx import Blocks, Buffer, Endpoint, Request, UcxError, Worker
from kvtransfer.ucx_offers import MAX_OFFER_BYTES, MAX_OFFERED_BYTES, Offers
from kvtransfer.ucx_wire import (
    INTRODUCTION_INDEX,
    MAX_NOTE_BYTES,
    NO_OFFER,
    NO_SOURCE,
    Answer,
    Gone,
    IntroducedBlock,
    can_be_told,
    introduce,
    num_introduced,
    open_address,
    read_reply,
)

# Enough to keep the wire full; what is posted cannot be called back, so a cancel waits for this much.
WINDOW_BYTES: Final = 16 << 20
# With so many blocks the receiver is busy while the others' digests are taken (measured, one by one: 13 µs each, a
# block lands in 90).
_FIRST_BLOCKS: Final = 8
_FIRST_OFFERED: Final = 4


class Link:
    """Owned by the kv-io thread. After `fail` it lives until it is ``gone``, then its owner calls `give_up`.

    It starts as failed if UCX connects over something else than the plane requires. ``lost``: it failed because the
    peer is gone, in the middle of whatever.
    """

    def __init__(self, push: Push, worker: Worker, context: RoadContext) -> None:
        self.peer = push.peer
        self.address = push.address
        self.failed = False
        self.lost = False
        self._failed_s = 0.0
        self._context = context
        self._block_bytes = push.block_bytes
        self._endpoint = Endpoint(worker, open_address(context.secret, push.address))
        self._pushes: deque[Push] = deque()
        self._unsealed: list[Push] = []
        self._introduced: dict[Push, set[int]] = {}
        self._posted: list[tuple[Request, Push, PushItem]] = []
        self._introducing: list[Request] = []
        # Offered in vain: to be sent.
        self._again: deque[tuple[Push, PushItem]] = deque()
        self._blocks = Blocks(len(context.pool), context.block)
        self._unpaced = False
        self.transports = self._endpoint.transports()
        same_blocks = push.block_bytes == context.block_bytes
        possible = context.memory is not None and same_blocks and satisfies(self.transports, "shm")
        self._offers = Offers(possible=possible)
        refusal = context.routes.connected(self, Route(self.peer, "sending", "ucx", self.transports))
        if refusal is not None:
            self.fail(refusal)

    @property
    def busy(self) -> bool:
        return bool(self._posted or self._pushes or self._introducing or self._again or self._offers.num_blocks)

    @property
    def gone(self) -> bool:
        return self.failed and self._endpoint.closed

    @property
    def _num_first(self) -> int:
        return _FIRST_OFFERED if self._offers.possible else _FIRST_BLOCKS

    def add(self, push: Push) -> None:
        self._context.seal(push, self._num_first)
        if push not in self._unsealed:
            self._unsealed.append(push)
        if push not in self._pushes:
            self._pushes.append(push)

    def turn(self, reply_to: bytes) -> None:
        """Report what was sent, then fill the window. ``reply_to`` is our own address, for replies."""
        self._report_and_fill(reply_to)
        for push in self._unsealed:
            self._context.seal(push)
        self._unsealed.clear()

    def _report_and_fill(self, reply_to: bytes) -> None:
        self._reap()
        while not self.failed:
            if self._endpoint.broken:
                self.lose("endpoint broken")
                return
            try:
                self._fill(reply_to)
            except UcxError as error:
                self.lose(str(error))
                return
            # A small block is sent at once, and no event of UCX will ever tell.
            if not self._reap():
                return

    def lose(self, reason: str) -> None:
        """The peer is gone, says UCX."""
        # Without a push under way it may just as well be a peer that replaced its worker.
        if self._mine() and self.peer not in self._context.dead:
            self._context.events.put(PeerLost(self.peer.node_id, self.peer.epoch))
        self.lost = True
        self.fail(f"connection lost: {reason}")

    def is_stuck(self, limit_s: float) -> bool:
        """True if its endpoint has been closing for longer than that."""
        return self.failed and not self.gone and time.monotonic() - self._failed_s > limit_s

    def fail(self, reason: str) -> None:
        """Close the endpoint and fail every push through it; `PushFailed` comes when it is closed."""
        self.close()
        for push in self._mine():
            self._context.sends.fail(push, reason)
        self._context.events.wake()

    def close(self) -> None:
        """Close the endpoint; pushes may go on over another link."""
        if not self.failed:
            self._failed_s = time.monotonic()
        self.failed = True
        self._context.routes.closed(self)
        self._pushes.clear()
        self._endpoint.close()

    def requests(self) -> list[Request]:
        """Those that UCX still has in hand."""
        return [request for request, _, _ in self._posted] + self._introducing

    def give_up(self) -> list[Request]:
        """Report what is still posted as lost. Returns its requests, which must be kept: UCX holds them.

        Closing an endpoint does not end a send over shared memory whose receiver is gone or hangs. Such a
        receiver may still read our block, into a pool that nobody believes any more.
        """
        requests = self.requests()
        ended = [(push, item) for _, push, item in self._posted] + [*self._again, *self._offers.give_up()]
        self._posted = []
        self._again.clear()
        for push, item in ended:
            self._context.sends.lost(push, item.index)
        return requests

    def answered(self, answer: Answer) -> None:
        """The receiver has read what it was offered, or will not; another link's offer is ignored."""
        if answer.peer != self.peer:
            return
        ended = self._offers.end(answer.offer, answer.outcome)
        if ended is None:
            return
        push, items = ended
        if answer.outcome == "unreadable":
            self._again.extend((push, item) for item in items)
            return
        if answer.outcome == "copied" and not self.failed and not self.transports.startswith("mapped+"):
            self.transports = f"mapped+{self.transports}"
            self._context.routes.connected(self, Route(self.peer, "sending", "ucx", self.transports))
        self._context.sends.sent(push, *(item.index for item in items))

    def leak(self) -> None:
        """The worker was destroyed below the endpoint."""
        self._endpoint.leak()

    def _mine(self) -> list[Push]:
        pushes = self._context.sends.pushes_to(self.peer, "ucx")
        return [push for push in pushes if push.address == self.address]

    def _reap(self) -> bool:
        self._introducing = [request for request in self._introducing if not request.done]
        done = [entry for entry in self._posted if entry[0].done]
        if not done:
            return False
        if not self._unpaced:  # by now every lane is connected
            self._unpaced = True
            unpace_all()
        self._posted = [entry for entry in self._posted if not entry[0].done]
        sent: dict[Push, list[int]] = {}
        for request, push, item in done:
            error = request.error()
            if error is None:
                sent.setdefault(push, []).append(item.index)
                continue
            self._context.sends.lost(push, item.index)
            if not self.failed:
                self.lose(error)
        for push, indexes in sent.items():
            self._context.sends.sent(push, *indexes)
        self._introduced = {push: told for push, told in self._introduced.items() if not push.over}
        return True

    def _fill(self, reply_to: bytes) -> None:
        while self._again and self._room():
            again, offered = self._again.popleft()
            if again.session.is_draining:
                self._context.sends.lost(again, offered.index)
            else:
                self._send(again, offered, reply_to)
        while self._pushes and self._room():
            push = self._pushes.popleft()
            item = self._context.sends.take(push)
            if item is None:
                continue
            self._pushes.append(push)
            if self._offers.possible and can_be_told(reply_to) and item.run is None:
                self._offer(push, item, reply_to)
            else:
                self._send(push, item, reply_to)

    def _room(self) -> int:
        """Blocks that may go out now: one at least if none is, however large."""
        num_out = len(self._posted) + self._offers.num_blocks
        window_bytes = MAX_OFFERED_BYTES if self._offers.possible else WINDOW_BYTES
        return max(num_out == 0, window_bytes // self._block_bytes - num_out)

    def _offer(self, push: Push, item: PushItem, reply_to: bytes) -> None:
        """Offer this block, and as many of those behind it as go into one offer."""
        context = self._context
        limit = min(num_introduced(reply_to), self._room(), max(1, MAX_OFFER_BYTES // self._block_bytes))
        if push in self._unsealed:
            limit = min(limit, self._num_first)
        items = [item]
        while len(items) < limit and (waiting := context.sends.waiting(push, 1)):
            # The owner may cancel the push between the two.
            if waiting[0].run is not None or (another := context.sends.take(push)) is None:
                break
            items.append(another)
        number = self._offers.add(push, items)
        self._say(push, items, reply_to, number)
        if push in self._unsealed:
            # The receiver has something to copy: now the digests of all others, in one go.
            self._context.seal(push)
            self._unsealed.remove(push)

    def _send(self, push: Push, item: PushItem, reply_to: bytes) -> None:
        try:
            self._introduce(push, item, reply_to)
            tag = (push.ticket_id << INDEX_BITS) | item.index
            block = self._blocks[item.block_id] if item.run is None else self._context.outgoing(push, item)
            request = self._endpoint.send(block, tag)
        except UcxError:
            self._context.sends.lost(push, item.index)
            raise
        self._posted.append((request, push, item))

    def _introduce(self, push: Push, item: PushItem, reply_to: bytes) -> None:
        """Say who pushes this block and what it holds, for those behind it in the queue too."""
        told = self._introduced.get(push)
        if told is not None and item.index in told:
            return
        reply_to = b"" if told else reply_to
        limit = num_introduced(reply_to) if told else min(self._num_first, num_introduced(reply_to))
        items = [item, *self._context.sends.waiting(push, limit - 1)]
        self._say(push, items, reply_to, NO_OFFER)
        self._introduced.setdefault(push, set()).update(each.index for each in items)

    def _say(self, push: Push, items: list[PushItem], reply_to: bytes, offer: int) -> None:
        context = self._context
        blocks = [
            IntroducedBlock(each.index, context.digest(push, each), each.block_id if offer else NO_SOURCE)
            for each in items
        ]
        data = introduce(context, push.ticket_id, push.peer, reply_to, blocks, offer)
        tag = (push.ticket_id << INDEX_BITS) | INTRODUCTION_INDEX
        self._introducing.append(self._endpoint.send(_buffer(data), tag))


class Replies:
    """What receivers say to our sending worker."""

    def __init__(self, worker: Worker, context: RoadContext) -> None:
        self._worker = worker
        self._context = context
        self._reading: list[tuple[Request, Buffer]] = []

    def turn(self) -> list[Gone | Answer]:
        """What was said since the last turn."""
        while (message := self._worker.probe()) is not None:
            # A longer one is not ours: it ends in the buffer it does not fit.
            buffer = np.zeros(MAX_NOTE_BYTES, np.uint8)
            self._reading.append((self._worker.receive(message, buffer), buffer[: message.length]))
        done = [(request, buffer) for request, buffer in self._reading if request.done]
        if not done:
            return []
        self._reading = [(request, buffer) for request, buffer in self._reading if not request.done]
        notes = [buffer.tobytes() for request, buffer in done if request.error() is None]
        return [reply for note in notes if (reply := read_reply(self._context, note)) is not None]

    def requests(self) -> list[Request]:
        return [request for request, _ in self._reading]


def _buffer(data: bytes) -> Buffer:
    return np.frombuffer(data, np.uint8).copy()
