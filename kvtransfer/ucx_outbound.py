"""The sending end of the UCX road: one endpoint to one worker of a peer, and the window of bytes in flight."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import numpy as np

from kvtransfer.events import PeerLost
from kvtransfer.pacing import unpace_all
from kvtransfer.road import RoadContext
from kvtransfer.routes import Route
from kvtransfer.sends import Push, PushItem
from kvtransfer.ticket import INDEX_BITS
from kvtransfer.ucx import Blocks, Buffer, Endpoint, Request, UcxError, Worker
from kvtransfer.ucx_wire import (
    INTRODUCTION_INDEX,
    MAX_NOTE_BYTES,
    introduce,
    num_introduced,
    open_address,
    read_farewell,
)

# Enough to keep the wire full; what is posted cannot be called back, so a cancel waits for this much.
WINDOW_BYTES: Final = 16 << 20
# With so many blocks the receiver is busy while the others' digests are taken (measured: 13 µs each, a block lands in
# 90 over shared memory).
_FIRST_BLOCKS: Final = 8


class Link:
    """Owned by the kv-io thread. After `fail` it lives until it is ``gone``, then its owner calls `give_up`.

    It starts as failed if UCX connects over something else than the plane requires.
    """

    def __init__(self, push: Push, worker: Worker, context: RoadContext) -> None:
        self.peer = push.peer
        self.address = push.address
        self.failed = False
        self._failed_s = 0.0
        self._context = context
        self._block_bytes = push.block_bytes
        self._endpoint = Endpoint(worker, open_address(context.secret, push.address))
        self._pushes: deque[Push] = deque()
        self._unsealed: list[Push] = []
        self._introduced: dict[Push, set[int]] = {}
        self._posted: list[tuple[Request, Push, PushItem]] = []
        self._introducing: list[Request] = []
        self._blocks = Blocks(context.pool)
        self._unpaced = False
        self.transports = self._endpoint.transports()
        refusal = context.routes.connected(self, Route(self.peer, "sending", "ucx", self.transports))
        if refusal is not None:
            self.fail(refusal)

    @property
    def busy(self) -> bool:
        return bool(self._posted or self._pushes or self._introducing)

    @property
    def gone(self) -> bool:
        return self.failed and self._endpoint.closed

    def add(self, push: Push) -> None:
        self._context.seal(push, _FIRST_BLOCKS)
        self._unsealed.append(push)
        if push not in self._pushes:
            self._pushes.append(push)

    def turn(self, reply_to: bytes) -> None:
        """Report what was sent, then fill the window. ``reply_to`` is our own address, for farewells."""
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
        posted, self._posted = self._posted, []
        for _, push, item in posted:
            self._context.sends.lost(push, item.index)
        return requests

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
        # One block at least, however large.
        while self._pushes and (not self._posted or (len(self._posted) + 1) * self._block_bytes <= WINDOW_BYTES):
            push = self._pushes.popleft()
            item = self._context.sends.take(push)
            if item is None:
                continue
            self._pushes.append(push)
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
        context = self._context
        reply_to = b"" if told else reply_to
        limit = num_introduced(reply_to) if told else min(_FIRST_BLOCKS, num_introduced(reply_to))
        items = [item, *context.sends.waiting(push, limit - 1)]
        digests = {each.index: context.digest(push, each) for each in items}
        data = introduce(context, push.ticket_id, push.peer, reply_to, digests)
        tag = (push.ticket_id << INDEX_BITS) | INTRODUCTION_INDEX
        self._introducing.append(self._endpoint.send(_buffer(data), tag))
        self._introduced.setdefault(push, set()).update(digests)


class Replies:
    """What receivers say to our sending worker: farewells, and nothing else."""

    def __init__(self, worker: Worker, context: RoadContext) -> None:
        self._worker = worker
        self._context = context
        self._reading: list[tuple[Request, Buffer]] = []

    def turn(self) -> list[bytes]:
        """Names of receivers' workers that are gone."""
        while (message := self._worker.probe()) is not None:
            # A longer one is not ours: it ends in the buffer it does not fit.
            buffer = np.zeros(MAX_NOTE_BYTES, np.uint8)
            self._reading.append((self._worker.receive(message, buffer), buffer[: message.length]))
        done = [(request, buffer) for request, buffer in self._reading if request.done]
        if not done:
            return []
        self._reading = [(request, buffer) for request, buffer in self._reading if not request.done]
        notes = [buffer.tobytes() for request, buffer in done if request.error() is None]
        return [name for note in notes if (name := read_farewell(self._context, note)) is not None]

    def requests(self) -> list[Request]:
        return [request for request, _ in self._reading]


def _buffer(data: bytes) -> Buffer:
    return np.frombuffer(data, np.uint8).copy()
