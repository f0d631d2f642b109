"""The way back from a receiving worker to those who send to it: for answers to their offers, and for a farewell."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtransfer.errors import HelloError
from kvtransfer.road import RoadContext
from kvtransfer.routes import Route, shares_memory
from kvtransfer.ticket import INDEX_BITS, PeerId
from kvtransfer.ucx import Endpoint, Request, UcxError, Worker
from kvtransfer.ucx_wire import REPLY_TICKET, Introduced, Outcome, answer, farewell, open_address

logger = logging.getLogger(__name__)

_FAREWELL_S: Final = 0.5


@dataclass(eq=False)
class _WayBack:
    """``lanes`` are read when the endpoint is made: asking a closed one for them would crash."""

    endpoint: Endpoint
    lanes: str


class Senders:
    """Owned by one intake. UCX finds the sender's own connection for an endpoint to it and makes no new one; a new one
    at the end could meet a peer that is ending too, and UCX 1.21 over TCP aborts the process when a worker goes away
    while it is being connected to.
    """

    def __init__(self, worker: Worker, context: RoadContext) -> None:
        self._worker = worker
        self._context = context
        self._ways: dict[tuple[PeerId, bytes], _WayBack] = {}
        self._answers: list[Request] = []

    def meet(self, said: Introduced) -> bool:
        """Have a way back to this sender, which also says over what its blocks come. False if there is none."""
        key = (said.peer, said.reply_to)
        way = self._ways.get(key)
        if way is not None and not way.endpoint.broken:
            return True
        if way is not None or not said.reply_to:
            return False
        try:
            endpoint = Endpoint(self._worker, open_address(self._context.secret, said.reply_to))
        except (UcxError, HelloError) as error:
            logger.warning("no way back to %s: %s", said.peer.node_id, error)
            return False
        self._ways[key] = way = _WayBack(endpoint, endpoint.transports())
        self._context.routes.connected(endpoint, Route(said.peer, "receiving", "ucx", way.lanes))
        return True

    def share_memory(self, peer: PeerId) -> bool:
        """Whether this peer writes into a queue of our worker by itself."""
        return any(each == peer and shares_memory(way.lanes) for (each, _), way in self._ways.items())

    def knows(self, peer: PeerId) -> bool:
        """Whether it can be told anything."""
        return any(each == peer for each, _ in self._ways)

    def copied_from(self, said: Introduced) -> None:
        """Blocks of this sender were copied out of its pool: that is what carries them."""
        way = self._ways[said.peer, said.reply_to]
        if not way.lanes.startswith("mapped+"):
            way.lanes = f"mapped+{way.lanes}"
            self._context.routes.connected(way.endpoint, Route(said.peer, "receiving", "ucx", way.lanes))

    def answer(self, said: Introduced, outcome: Outcome) -> None:
        """Say what became of an offer of a sender that was met.

        If UCX loses the answer, its sender is gone, or keeps the blocks until its push is cancelled and ends by force.
        """
        way = self._ways.get((said.peer, said.reply_to))
        if way is None or way.endpoint.broken:
            logger.warning("an offer of %s cannot be answered", said.peer.node_id)
            return
        data = np.frombuffer(answer(self._context, said.peer, said.offer, outcome), np.uint8).copy()
        try:
            self._answers.append(way.endpoint.send(data, REPLY_TICKET << INDEX_BITS))
        except UcxError as error:
            logger.warning("an offer of %s cannot be answered: %s", said.peer.node_id, error)

    def turn(self) -> list[tuple[PeerId, str]]:
        """Close what broke. Returns the peers that are gone, and over what they came."""
        self._answers = [request for request in self._answers if not request.done]
        for way in self._ways.values():
            if way.endpoint.broken:
                way.endpoint.close()
        gone = [(key, way) for key, way in self._ways.items() if way.endpoint.closed]
        for key, way in gone:
            self._context.routes.closed(way.endpoint)
            del self._ways[key]
        return [(peer, way.lanes) for (peer, _), way in gone if not self.knows(peer)]

    def say_farewell(self, address: bytes) -> list[Request]:
        """Tell every sender, also one declared dead: it may only have been slow, and would wait for ever.

        Returns every request that UCX still has in hand.
        """
        notes = []
        for (peer, _), way in self._ways.items():
            if not way.endpoint.broken:
                data = np.frombuffer(farewell(self._context, peer, address), np.uint8).copy()
                with contextlib.suppress(UcxError):
                    notes.append(way.endpoint.send(data, REPLY_TICKET << INDEX_BITS))
        until = time.monotonic() + _FAREWELL_S
        while not all(note.done for note in notes) and time.monotonic() < until:
            self._worker.progress()
        return notes + self._answers

    def leak(self) -> None:
        """The worker was destroyed below the endpoints."""
        for way in self._ways.values():
            self._context.routes.closed(way.endpoint)
            way.endpoint.leak()
        self._ways.clear()
        self._answers.clear()
