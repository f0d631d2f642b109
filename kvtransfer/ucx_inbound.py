"""The receiving end of the UCX road: one worker, asked for each message where it may go.

There is no generation on this wire. A tag names (ticket, block), ticket numbers are never used twice, and a
message is received into the pool only while that block of that ticket is open: that is the fence. Digests come ahead
of their blocks, in introductions; UCX keeps the order of messages of one endpoint.
"""

from __future__ import annotations

import math
import time
from typing import Final

import numpy as np

from kvtransfer.events import PeerLost
from kvtransfer.receives import Claim
from kvtransfer.road import RoadContext
from kvtransfer.routes import shares_memory
from kvtransfer.ticket import INDEX_BITS, PeerId
from kvtransfer.ucx import Blocks, Buffer, Context, Message, Request, Worker
from kvtransfer.ucx_offers import PeerMemories
from kvtransfer.ucx_senders import Senders
from kvtransfer.ucx_wire import (
    HEARING_TAG,
    INTRODUCTION_INDEX,
    MAX_NOTE_BYTES,
    Introduced,
    Outcome,
    read_introduction,
    seal_address,
)

# Blocks that wait for a worker's end get it after so long, whoever else is served by it.
RETIRED_S: Final = 30.0
# The next blocks of an offer come so soon, or not at all.
_NEXT_OFFER_S: Final = 0.001
# Then the road's other workers have their turn, and the owner hears of what landed.
_TURN_S: Final = 0.005
_INDEX_MASK: Final = (1 << INDEX_BITS) - 1


class Intake:
    """Owned by the kv-io thread. Holds the claims of the blocks that are landing through its worker.

    Fence. A claim whose peer died, or whose receive ended with an error, is *doubtful*: UCX may still write the
    block. It is given back only after the worker is destroyed. To hurt nobody else, the road first retires the
    intake: new tickets get another worker, this one goes on until its last good ticket is over.

    Deafness. Over shared memory all senders write into one queue of the worker. One that is killed in the middle of
    it leaves a place that is taken and never filled, and UCX waits there for ever: in our trials every twelfth
    receiver of small blocks heard nobody any more. So a lost sender retires the intake too; if it is found deaf then,
    it ends at once, and its other senders are told (ADR 15).
    """

    def __init__(self, ucx: Context, context: RoadContext, memories: PeerMemories) -> None:
        """``memories`` are the road's: an intake that follows this one need not map them again."""
        self.worker = Worker(ucx)
        self.address = seal_address(context.secret, self.worker.address)
        self._senders = Senders(self.worker, context)
        self.retired = False
        self._context = context
        self._landing: list[tuple[Request, Claim]] = []
        self._dropping: list[Request] = []
        self._notes: list[tuple[Request, int, Buffer]] = []
        self._doubtful: list[tuple[Request, Claim]] = []
        self._memories = memories
        # A sender over shared memory was lost; a `HearingTest` takes that back and finds out whether it ``hears``.
        self.may_be_deaf = False
        self.hears = False
        self._num_offers = 0
        self._offered_s = 0.0
        self._serving: set[int] = set()
        self._end_at = math.inf
        self._void = np.zeros(1, np.uint8)
        self._blocks = Blocks(len(context.pool), context.block)

    @property
    def busy(self) -> bool:
        """True while blocks are landing, or were copied a moment ago."""
        return bool(self._landing) or time.monotonic() - self._offered_s < _NEXT_OFFER_S

    @property
    def needs_fence(self) -> bool:
        return bool(self._doubtful) or self.may_be_deaf

    def turn(self) -> bool:
        """Progress, decide on what arrived, report what landed; again while blocks land one right after the other.

        Returns True if there is more to do: nothing will wake the road for that.
        """
        until = time.monotonic() + _TURN_S
        while True:
            num_offers = self._num_offers
            self.worker.progress()
            while (message := self.worker.probe()) is not None:
                self._decide(message)
                if time.monotonic() > until:
                    self._reap()
                    return True
            moved = self._reap() or self._num_offers != num_offers
            if not moved or time.monotonic() > until:
                return moved

    def peer_dead(self, peer: PeerId) -> None:
        """Doubt every block that may be this peer's. A ticket may have had several senders; doubt is cheap."""
        receives = self._context.receives
        self.may_be_deaf = self.may_be_deaf or self._senders.share_memory(peer)
        mine = [pair for pair in self._landing if peer in receives.introduced(pair[1].ticket_id)]
        self._doubt(mine, "the peer was declared dead")

    def retire(self) -> None:
        """Call when the road already gives out another address: only tickets open now can know this one."""
        self.retired = True
        self._serving = self._context.receives.wanted()
        self._serving -= {claim.ticket_id for _, claim in self._doubtful}

    def is_over(self) -> bool:
        """Retired, and no ticket is left that would miss the worker; each of them has a deadline of its own."""
        if not self.retired:
            return False
        self._serving &= self._context.receives.wanted()
        self._serving -= {claim.ticket_id for _, claim in self._doubtful}
        return not self._serving or time.monotonic() >= self._end_at

    def destroy(self, reason: str) -> None:
        """The fence: say farewell, destroy the worker, then give back every claim."""
        notes = self._senders.say_farewell(self.address)
        requests = [request for request, _ in self._landing + self._doubtful]
        requests += self._dropping + notes + [request for request, _, _ in self._notes]
        self.worker.destroy(requests)
        self._senders.leak()
        claims = [claim for _, claim in self._landing + self._doubtful]
        self._landing, self._doubtful, self._dropping, self._notes = [], [], [], []
        self._context.receives.abandon(claims, reason)

    def _decide(self, message: Message) -> None:
        receives = self._context.receives
        if message.tag == HEARING_TAG:
            self.hears = True
            self._dropping.append(self.worker.receive(message, self._void))
            return
        ticket_id, index = message.tag >> INDEX_BITS, message.tag & _INDEX_MASK
        if index == INTRODUCTION_INDEX and message.length <= MAX_NOTE_BYTES:
            buffer = np.zeros(max(1, message.length), np.uint8)
            self._notes.append((self.worker.receive(message, buffer), ticket_id, buffer))
            # Small, so it is here already, and it must count before the block behind it is looked at.
            self._reap_notes()
            return
        claim = None
        known = receives.introduced(ticket_id)
        if known and message.length == self._context.block_bytes:
            claim = receives.claim(ticket_id, index, None, known[-1], None)
        else:
            receives.refuse()
        if claim is None:
            self._dropping.append(self.worker.receive(message, self._void))
        else:
            request = self.worker.receive(message, self._blocks[claim.block_id])
            self._landing.append((request, claim))

    def _reap(self) -> bool:
        """Report what has landed. Returns whether something had."""
        self._reap_notes()
        for peer, lanes in self._senders.turn():
            self._memories.forget(peer)
            self.may_be_deaf = self.may_be_deaf or shares_memory(lanes)
        self._dropping = [request for request in self._dropping if not request.done]
        done = [pair for pair in self._landing if pair[0].done]
        if not done:
            return False
        self._landing = [pair for pair in self._landing if not pair[0].done]
        landed: list[Claim] = []
        for request, claim in done:
            error = request.error()
            if error is None:
                landed.append(claim)
            else:
                self._doubt([(request, claim)], error)
                if claim.peer not in self._context.dead:
                    self._context.events.put(PeerLost(claim.peer.node_id, claim.peer.epoch))
        # The owner's thread takes the GIL when it is woken: once a turn, not once a block.
        self._context.arrive(landed, wake=False)
        return True

    def _reap_notes(self) -> None:
        waiting = []
        for request, ticket_id, buffer in self._notes:
            if not request.done:
                waiting.append((request, ticket_id, buffer))
            elif request.error() is None:
                self._read_note(ticket_id, buffer.tobytes())
        self._notes = waiting

    def _read_note(self, ticket_id: int, data: bytes) -> None:
        said = read_introduction(self._context, ticket_id, data)
        if said is None:
            self._context.receives.refuse()
            return
        wanted = self._context.receives.introduce(ticket_id, said.peer, said.digests)
        met = (wanted or bool(said.offer)) and self._senders.meet(said)
        if wanted and (refusal := self._refusal(said.peer)) is not None:
            self._context.receives.refuse_sender(ticket_id, said.peer, refusal)
            wanted = False
        # Whoever offers waits for the answer, also if nobody wants it.
        if said.offer and met:
            self._senders.answer(said, self._take_offer(ticket_id, said) if wanted else "unwanted")
        elif said.offer and wanted:
            self._context.receives.refuse_sender(ticket_id, said.peer, "an offer came that cannot be answered")

    def _refusal(self, peer: PeerId) -> str | None:
        routes = self._context.routes
        if routes.required is not None and not self._senders.knows(peer):
            routes.refuse(peer, f"nobody knows over what {peer.node_id} sends, {routes.required} is required")
        return routes.refusal(peer)

    def _take_offer(self, ticket_id: int, said: Introduced) -> Outcome:
        if not self._memories.can_read(said):
            return "unreadable"
        self._senders.copied_from(said)
        self._memories.copy(ticket_id, said)
        self._num_offers += 1
        self._offered_s = time.monotonic()
        return "copied"

    def _doubt(self, pairs: list[tuple[Request, Claim]], reason: str) -> None:
        self._landing = [pair for pair in self._landing if pair not in pairs]
        self._doubtful += pairs
        if pairs:
            self._end_at = min(self._end_at, time.monotonic() + RETIRED_S)
        self._context.receives.doubt([claim for _, claim in pairs], reason)
