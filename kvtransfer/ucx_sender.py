"""The sending side of the UCX road: one worker and its links. It can be replaced, as the receiving one can."""

from __future__ import annotations

import time
from typing import Final

from kvtransfer.road import RoadContext
from kvtransfer.routes import shares_memory
from kvtransfer.sends import Push
from kvtransfer.ticket import PeerId
from kvtransfer.ucx import Context, Request, Worker
from kvtransfer.ucx_outbound import Link, Replies
from kvtransfer.ucx_wire import Answer, seal_address, worker_name

# An endpoint is closed in milliseconds, unless its peer hangs.
CLOSE_S: Final = 2.0
# A retired sender finishes what its other links have in hand, for so long at most.
RETIRED_S: Final = 30.0


class Sender:
    """Owned by the kv-io thread.

    Fence. UCX over TCP does not close an endpoint whose peer hangs: what was posted on it is never given back, and
    could still be read. Only destroying the worker ends that. To hurt nobody else the road first retires the sender:
    new pushes go through another one, the links of this one send what they have, then it is destroyed. So it does when
    a receiver that answered over shared memory is lost: the worker may be deaf (`kvtransfer.ucx_inbound`).
    """

    def __init__(self, ucx: Context, context: RoadContext) -> None:
        self.worker = Worker(ucx)
        self.transports = ""
        self._context = context
        self._reply_to = seal_address(context.secret, self.worker.address)
        self._replies = Replies(self.worker, context)
        self._links: dict[tuple[PeerId, bytes], Link] = {}
        self._failed: list[Link] = []
        self._orphans: list[Request] = []
        self._may_be_deaf = False
        self._retired_until: float | None = None

    @property
    def num_links(self) -> int:
        return len(self._links)

    @property
    def busy(self) -> bool:
        return any(link.busy for link in self._links.values())

    @property
    def is_closing(self) -> bool:
        """Somebody must look at it though UCX says nothing."""
        return bool(self._failed) or self._retired_until is not None

    @property
    def needs_fence(self) -> bool:
        return self._may_be_deaf or any(link.is_stuck(CLOSE_S) for link in self._failed)

    def start(self, push: Push) -> None:
        """Raises `UcxError` if it cannot connect."""
        link = self._links.get((push.peer, push.address))
        if link is not None and link.failed:  # a moment ago; the next turn would have taken it out
            self._failed.append(self._links.pop((push.peer, push.address)))
            link = None
        if link is None:
            link = Link(push, self.worker, self._context)
            if link.failed:
                self._failed.append(link)
                return
            self._links[link.peer, link.address] = link
        link.add(push)

    def turn(self) -> list[bytes]:
        """Progress, send, report. Returns the names of receivers' workers that say that they are gone."""
        self.worker.progress()
        gone = self._hear()
        for link in list(self._links.values()):
            link.turn(self._reply_to)
            self.transports = link.transports or self.transports
            if link.failed:
                del self._links[link.peer, link.address]
                self._failed.append(link)
                self._may_be_deaf = self._may_be_deaf or (link.lost and shares_memory(link.transports))
        for link in self._failed:
            link.turn(self._reply_to)
            if link.gone:
                self._orphans += link.give_up()
        self._failed = [link for link in self._failed if not link.gone]
        self._orphans = [request for request in self._orphans if not request.done]
        return gone

    def _hear(self) -> list[bytes]:
        gone = []
        for reply in self._replies.turn():
            if isinstance(reply, Answer):
                for link in (*self._links.values(), *self._failed):
                    link.answered(reply)
            else:
                gone.append(reply.worker)
        return gone

    def lose_worker(self, name: bytes) -> None:
        """That worker of a receiver is gone."""
        for link in self._links.values():
            if worker_name(link.address) == name:
                link.fail("the receiver has closed this address")

    def drop_peer(self, peer: PeerId, reason: str) -> None:
        for link in self._links.values():
            if link.peer == peer:
                link.lost = True
                link.fail(reason)

    def retire(self) -> None:
        """Call when the road already has another one."""
        self._retired_until = time.monotonic() + RETIRED_S

    def is_over(self) -> bool:
        """Retired, and nothing is sent any more."""
        return self._retired_until is not None and (not self.busy or time.monotonic() >= self._retired_until)

    def destroy(self, reason: str | None) -> None:
        """The fence: close what can be closed, destroy the worker, then give back every block.

        With a ``reason`` every push through it fails; without, only those that still have blocks posted.
        """
        links = list(self._links.values())
        for link in [*links, *(self._failed if reason is not None else ())]:
            if reason is not None or link.busy:
                link.fail(reason or "the sender's worker was replaced")
            else:
                link.close()
        until = time.monotonic() + CLOSE_S
        waited_for = links if reason is None else [*links, *self._failed]
        while not all(link.gone for link in waited_for) and time.monotonic() < until:
            self.worker.progress()
            for link in waited_for:
                link.turn(self._reply_to)
        # The worker first: while it is there, what a stuck endpoint has in hand may be read.
        links = [*links, *self._failed]
        requests = [request for link in links for request in link.requests()]
        self.worker.destroy(requests + self._orphans + self._replies.requests())
        for link in links:
            link.give_up()
            link.leak()
        self._links.clear()
        self._failed.clear()
