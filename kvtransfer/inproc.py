"""Blocks between planes of one process: a copy, made at once on the pushing thread."""

from __future__ import annotations

import secrets
import threading
from typing import Final

from kvtransfer.errors import HelloError
from kvtransfer.road import Road, RoadContext
from kvtransfer.sends import Push, PushItem
from kvtransfer.ticket import PeerId

_ADDRESS_BYTES: Final = 16
_lock = threading.Lock()
_roads: dict[bytes, InprocRoad] = {}


class InprocRoad(Road):
    """Registers itself under a random address; holds no thread and no fd."""

    regroups = True

    def __init__(self, context: RoadContext) -> None:
        self._context = context
        self._address = secrets.token_bytes(_ADDRESS_BYTES)
        # Held while a block is copied, so that `close` returns only when nothing writes this pool any more.
        self._landing = threading.Lock()
        self._closed = False
        with _lock:
            _roads[self._address] = self

    def address(self) -> bytes:
        return self._address

    def check_address(self, address: bytes) -> None:
        if len(address) != _ADDRESS_BYTES:
            raise HelloError("not an inproc address")

    def start(self, push: Push) -> None:
        context = self._context
        with _lock:
            target = _roads.get(push.address)
        if target is None or push.peer != target._context.me:
            context.sends.fail(push, "the receiving plane is closed")
            return
        context.seal(push)
        while (item := context.sends.take(push)) is not None:
            target._receive(self._context, push, item)
            context.sends.sent(push, item.index)

    def _receive(self, sender: RoadContext, push: Push, item: PushItem) -> None:
        mine = self._context
        with self._landing:
            if self._closed:
                return
            digest = sender.digest(push, item)
            claim = mine.receives.claim(push.ticket_id, item.index, item.handle.generation, sender.me, digest)
            if claim is None:
                return
            mine.pool[claim.block_id] = sender.outgoing(push, item)
        mine.arrive([claim])

    def settle(self, ticket_id: int) -> None:
        """A copy under way ends by itself and gives its claim back."""

    def peer_dead(self, peer: PeerId) -> None:
        for push in self._context.sends.pushes_to(peer, "inproc"):
            self._context.sends.fail(push, "the peer was declared dead")

    def connections(self) -> int:
        return 0

    def transport(self) -> str:
        return "memory"

    def close(self, *, flush: bool) -> None:  # noqa: ARG002 - nothing is ever queued
        with _lock:
            _roads.pop(self._address, None)
        with self._landing:
            self._closed = True
