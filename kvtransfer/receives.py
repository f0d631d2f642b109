"""The receiving half's book: which blocks were consented to, which are landing, which arrived.

Every transport asks this ledger before it lets a byte near the pool (`claim`) and must give every claim back
exactly once: `landed` (the block holds the sender's bytes), `abandon` (it does not, and no further byte of it
can be written) or `release` (it was never begun). A ticket is `Withdrawn` only when no claim on it is out. That is
the whole fence. What a ticket's transfer may still do is decided by its `kvtransfer.session`.

Thread-safe: the owner's thread opens and withdraws, the transports' threads claim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtransfer.dead import DeadPeers
from kvtransfer.digest import BlockIdentity
from kvtransfer.errors import TicketError
from kvtransfer.events import BlocksArrived, EventBox, ReceiveFailed, Withdrawn
from kvtransfer.meter import TransferMeter
from kvtransfer.session import ReceiveSession
from kvtransfer.ticket import BlockHandle, PeerId, check_handles


@dataclass(eq=False, slots=True)
class Claim:
    """One block that may be written now, by ``peer``, who says that it will have ``digest``. Held by a transport.

    Never changed; not frozen only because making a frozen one takes three times as long, and there is one a block.
    """

    ticket_id: int
    index: int
    block_id: int
    peer: PeerId
    generation: int
    digest: int | None

    @property
    def identity(self) -> BlockIdentity:
        return BlockIdentity(self.ticket_id, self.index, self.generation)


@dataclass
class _Ticket:
    handles: tuple[BlockHandle, ...]
    sender: PeerId | None
    session: ReceiveSession
    arrived: set[int] = field(default_factory=set)
    on_device: set[int] = field(default_factory=set)
    claims: dict[int, Claim] = field(default_factory=dict)
    introduced: dict[PeerId, dict[int, int]] = field(default_factory=dict)

    @property
    def withdrawing(self) -> bool:
        """No block of it is wanted any more."""
        return self.session.is_draining


class ReceiveLedger:
    """Owns no memory: blocks belong to the caller of `open` again after `complete` or the event `Withdrawn`."""

    def __init__(self, num_blocks: int, events: EventBox, dead: DeadPeers, meter: TransferMeter | None = None) -> None:
        self._num_blocks = num_blocks
        self._events = events
        self._dead = dead
        self._meter = meter or TransferMeter()
        self._lock = threading.Lock()
        self._tickets: dict[int, _Ticket] = {}
        self._blocks_in_use: set[int] = set()
        self.blocks_received = 0
        self.blocks_refused = 0

    @property
    def open_tickets(self) -> int:
        return len(self._tickets)

    def refuse(self) -> None:
        """Count a block that named no ticket at all."""
        with self._lock:
            self.blocks_refused += 1

    def open(self, ticket_id: int, handles: tuple[BlockHandle, ...], sender: PeerId | None) -> None:
        """Consent. Raises `TicketError` for a known ticket, a bad handle, or a block another ticket still holds."""
        check_handles(handles, self._num_blocks)
        blocks = {handle.block_id for handle in handles}
        with self._lock:
            if ticket_id in self._tickets:
                raise TicketError(f"ticket {ticket_id} is already expected")
            if not blocks.isdisjoint(self._blocks_in_use):
                raise TicketError("a block of this ticket still belongs to another open ticket")
            self._blocks_in_use |= blocks
            self._tickets[ticket_id] = _Ticket(handles, sender, ReceiveSession(self._meter.now()))

    def introduce(self, ticket_id: int, peer: PeerId, digests: Mapping[int, int]) -> bool:
        """On a road whose blocks carry nothing else: ``peer`` has proven that it pushes blocks of this ticket.

        ``digests`` maps the positions it is about to send to what they will hold.
        """
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            unwanted = ticket is None or ticket.withdrawing or ticket.sender not in (None, peer)
            if ticket is None or unwanted or peer in self._dead:
                self.blocks_refused += 1
                return False
            theirs = ticket.introduced.pop(peer, {})
            theirs.update((i, digest) for i, digest in digests.items() if i < len(ticket.handles))
            ticket.introduced[peer] = theirs
            return True

    def refuse_sender(self, ticket_id: int, peer: PeerId, reason: str) -> None:
        """Take an introduction back: this peer's blocks may not come over what they come over. The owner is told."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is not None:
                ticket.introduced.pop(peer, None)
                self.blocks_refused += 1
                if ticket.session.broke_off(self._meter.now()):
                    self._events.put(ReceiveFailed(ticket_id, reason))
        self._events.wake()

    def introduced(self, ticket_id: int) -> tuple[PeerId, ...]:
        """Every peer that was introduced to this ticket, the latest last."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            return () if ticket is None else tuple(ticket.introduced)

    def claim(
        self, ticket_id: int, index: int, generation: int | None, peer: PeerId, digest: int | None
    ) -> Claim | None:
        """Ask to write one block; None (counted) for anything that was not consented to, or not any more.

        Also for a peer that was declared dead: its connections may live a moment longer.

        ``generation`` and ``digest`` are None on a transport that carries neither with its blocks; then the
        sender's introduction has told the digest.
        """
        with self._lock:
            claim = self._claim(ticket_id, index, generation, peer, digest)
            self._meter.moving(0 if claim is None else 1)
            return claim

    def claim_all(self, ticket_id: int, indexes: Iterable[int], peer: PeerId) -> list[Claim]:
        """As `claim`, of several blocks that were introduced; those refused are left out."""
        with self._lock:
            claims = [self._claim(ticket_id, index, None, peer, None) for index in indexes]
            made = [claim for claim in claims if claim is not None]
            self._meter.moving(len(made))
            return made

    def _claim(
        self, ticket_id: int, index: int, generation: int | None, peer: PeerId, digest: int | None
    ) -> Claim | None:
        ticket = self._tickets.get(ticket_id)
        if (
            ticket is None
            or ticket.withdrawing
            or not 0 <= index < len(ticket.handles)
            or (generation is not None and ticket.handles[index].generation != generation)
            or ticket.sender not in (None, peer)
            or peer in self._dead
            or index in ticket.arrived
            or index in ticket.claims
        ):
            self.blocks_refused += 1
            return None
        if digest is None:
            digest = ticket.introduced.get(peer, {}).get(index)
        handle = ticket.handles[index]
        claim = Claim(ticket_id, index, handle.block_id, peer, handle.generation, digest)
        ticket.claims[index] = claim
        ticket.session.claimed(self._meter.now())
        return claim

    def landed(self, claims: Iterable[Claim], *, wake: bool = True, on_device: bool = False) -> None:
        """The blocks are complete. Emits `BlocksArrived`, or `Withdrawn` if that was all a withdrawal waited for.

        Without ``wake`` the caller wakes the event box himself, once more blocks have landed. ``on_device``: not in
        the pool, but in the device's.
        """
        arrived: dict[int, list[int]] = {}
        with self._lock:
            for claim in claims:
                ticket = self._give_back(claim)
                self.blocks_received += 1
                if ticket.withdrawing:
                    self._finish_withdrawal(claim.ticket_id, ticket)
                else:
                    ticket.arrived.add(claim.index)
                    if on_device:
                        ticket.on_device.add(claim.index)
                    arrived.setdefault(claim.ticket_id, []).append(claim.index)
            self._events.put(*(BlocksArrived(ticket_id, tuple(indexes)) for ticket_id, indexes in arrived.items()))
        if wake:
            self._events.wake()

    def abandon(self, claims: Iterable[Claim], reason: str) -> None:
        """The blocks did not arrive and cannot be written any more. Emits `ReceiveFailed` or `Withdrawn`."""
        with self._lock:
            for claim in claims:
                ticket = self._give_back(claim)
                if ticket.session.broke_off(self._meter.now()):
                    self._events.put(ReceiveFailed(claim.ticket_id, reason))
                else:
                    self._finish_withdrawal(claim.ticket_id, ticket)
        self._events.wake()

    def release(self, claims: Iterable[Claim]) -> None:
        """Nothing was written into the blocks and nothing will be: they may be claimed again."""
        with self._lock:
            for claim in claims:
                ticket = self._give_back(claim)
                if ticket.withdrawing:
                    self._finish_withdrawal(claim.ticket_id, ticket)
        self._events.wake()

    def doubt(self, claims: Iterable[Claim], reason: str) -> None:
        """The blocks will not arrive, but bytes may still be written: tell the owner, keep the claims."""
        with self._lock:
            for claim in claims:
                if self._tickets[claim.ticket_id].session.broke_off(self._meter.now()):
                    self._events.put(ReceiveFailed(claim.ticket_id, reason))
        self._events.wake()

    def withdraw(self, ticket_id: int) -> bool:
        """Take the consent back; no claim is granted from here on. Unknown tickets are none of our business.

        Returns whether claims are still out, that is, whether a transport has something to settle.
        """
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is None:
                return False
            ticket.session.withdraw(self._meter.now())
            self._finish_withdrawal(ticket_id, ticket)
            outstanding = bool(ticket.claims)
        self._events.wake()
        return outstanding

    def withdraw_sender(self, sender: PeerId) -> None:
        """Withdraw every ticket that was opened for this sender."""
        with self._lock:
            ticket_ids = [number for number, ticket in self._tickets.items() if ticket.sender == sender]
        for ticket_id in ticket_ids:
            self.withdraw(ticket_id)

    def withdraw_all(self) -> None:
        """Withdraw everything: nothing can write any more."""
        with self._lock:
            ticket_ids = list(self._tickets)
        for ticket_id in ticket_ids:
            self.withdraw(ticket_id)

    def is_withdrawing(self, ticket_id: int) -> bool:
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            return ticket is not None and ticket.withdrawing

    def wanted(self) -> set[int]:
        """Tickets that are open and not being withdrawn."""
        with self._lock:
            return {number for number, ticket in self._tickets.items() if not ticket.withdrawing}

    def complete(self, ticket_id: int) -> list[int]:
        """Forget a ticket all of whose blocks arrived. Returns those that are in the pool, and not in the device's.

        Raises `TicketError` if one is missing; unknown is fine.
        """
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is None:
                return []
            missing = len(ticket.handles) - len(ticket.arrived)
            if missing or ticket.withdrawing:
                raise TicketError(f"ticket {ticket_id} is not complete: {missing} blocks missing")
            ticket.session.complete(self._meter.now())
            self._forget(ticket_id, ticket)
            handles = enumerate(ticket.handles)
            return [handle.block_id for index, handle in handles if index not in ticket.on_device]

    def overdue(self, now: float) -> set[PeerId]:
        """Peers whose blocks have kept an unwanted ticket from ending for too long. Each ticket is reported once."""
        with self._lock:
            tickets = [ticket for ticket in self._tickets.values() if ticket.session.must_be_forced(now)]
            return {claim.peer for ticket in tickets for claim in ticket.claims.values()}

    def _give_back(self, claim: Claim) -> _Ticket:
        ticket = self._tickets[claim.ticket_id]
        if ticket.claims.get(claim.index) is not claim:
            raise RuntimeError(f"claim on block {claim.index} of ticket {claim.ticket_id} given back twice")
        del ticket.claims[claim.index]
        self._meter.moving(-1)
        return ticket

    def _finish_withdrawal(self, ticket_id: int, ticket: _Ticket) -> None:
        if ticket.session.settle(len(ticket.claims), self._meter.now()):
            self._forget(ticket_id, ticket)
            self._events.put(Withdrawn(ticket_id))

    def _forget(self, ticket_id: int, ticket: _Ticket) -> None:
        del self._tickets[ticket_id]
        self._meter.ended("receive", ticket.session.state.value, self._meter.now() - ticket.session.began_s)
        self._blocks_in_use.difference_update(handle.block_id for handle in ticket.handles)
