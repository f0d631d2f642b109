"""The sending end of the UCX road: one endpoint to one worker of a peer, and the window of bytes in flight."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from kvtransfer.events import PeerLost
from kvtransfer.road import RoadContext
from kvtransfer.sends import Push, PushItem
from kvtransfer.ticket import INDEX_BITS
from kvtransfer.ucx import Endpoint, Request, UcxError, Worker
from kvtransfer.ucx_wire import INTRODUCTION_INDEX, introduce, open_address

# Enough to keep the wire full; what is posted cannot be called back, so a cancel waits for this much.
WINDOW_BYTES: Final = 16 << 20


class Link:
    """Owned by the kv-io thread. After `fail` it lives until its endpoint is closed and nothing is posted."""

    def __init__(self, push: Push, worker: Worker, context: RoadContext) -> None:
        self.peer = push.peer
        self.address = push.address
        self.failed = False
        self.transports = ""
        self._context = context
        self._endpoint = Endpoint(worker, open_address(context.secret, push.address))
        self._pushes: deque[Push] = deque()
        self._introduced: set[Push] = set()
        self._posted: list[tuple[Request, Push, PushItem]] = []
        self._introducing: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self._posted or self._pushes or self._introducing)

    @property
    def gone(self) -> bool:
        return self.failed and self._endpoint.closed and not self._posted

    def add(self, push: Push) -> None:
        if push not in self._pushes:
            self._pushes.append(push)

    def turn(self) -> None:
        """Report what was sent, then fill the window."""
        self._reap()
        if self._endpoint.broken and not self.failed:
            self.lose("endpoint broken")
        if self.failed:
            return
        try:
            self._fill()
        except UcxError as error:
            self.lose(str(error))

    def lose(self, reason: str) -> None:
        """The peer is gone, says UCX."""
        # Without a push under way it may just as well be a peer that replaced its worker.
        if self._mine() and self.peer not in self._context.dead:
            self._context.events.put(PeerLost(self.peer.node_id, self.peer.epoch))
        self.fail(f"connection lost: {reason}")

    def fail(self, reason: str) -> None:
        """Close the endpoint and fail every push through it; `PushFailed` waits for what is posted."""
        self.failed = True
        self._pushes.clear()
        self._endpoint.close()
        for push in self._mine():
            self._context.sends.fail(push, reason)
        self._context.events.wake()

    def requests(self) -> list[Request]:
        return [request for request, _, _ in self._posted] + self._introducing

    def give_up(self) -> None:
        """The worker is destroyed: nothing is read any more."""
        self._endpoint.leak()
        posted, self._posted = self._posted, []
        for _, push, item in posted:
            self._context.sends.lost(push, item.index)

    def _mine(self) -> list[Push]:
        pushes = self._context.sends.pushes_to(self.peer, "ucx")
        return [push for push in pushes if push.address == self.address]

    def _reap(self) -> None:
        self._introducing = [request for request in self._introducing if not request.done]
        done = [entry for entry in self._posted if entry[0].done]
        if not done:
            return
        self._posted = [entry for entry in self._posted if not entry[0].done]
        for request, push, item in done:
            error = request.error()
            if error is None:
                self._context.sends.sent(push, item.index)
                continue
            self._context.sends.lost(push, item.index)
            if not self.failed:
                self.lose(error)
        self._introduced = {push for push in self._introduced if not push.over}
        if not self.transports and not self.failed:
            self.transports = self._endpoint.transports()

    def _fill(self) -> None:
        block_bytes = self._context.block_bytes
        # One block at least, however large.
        while self._pushes and (not self._posted or (len(self._posted) + 1) * block_bytes <= WINDOW_BYTES):
            push = self._pushes.popleft()
            item = self._context.sends.take(push)
            if item is None:
                continue
            self._pushes.append(push)
            try:
                self._introduce(push)
                tag = (push.ticket_id << INDEX_BITS) | item.index
                request = self._endpoint.send(self._context.pool[item.block_id], tag)
            except UcxError:
                self._context.sends.lost(push, item.index)
                raise
            self._posted.append((request, push, item))

    def _introduce(self, push: Push) -> None:
        if push not in self._introduced:
            data = np.frombuffer(introduce(self._context, push.ticket_id, push.peer), np.uint8).copy()
            tag = (push.ticket_id << INDEX_BITS) | INTRODUCTION_INDEX
            self._introducing.append(self._endpoint.send(data, tag))
            self._introduced.add(push)
