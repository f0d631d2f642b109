"""The contract of this room: a `KVPlane` moves blocks between its own pool and the pools of its peers.

Who knows what. The *receiver* makes up a ticket id, consents with `expect` to exactly the blocks it reserved,
and hands `ticket` (its hello and the handles) to the sender over the control plane. The *sender* calls `push`,
chunk by chunk. The receiver hears `BlocksArrived` for each block and calls `complete` when it has them all.

Who owns what. The pool is borrowed from `open_plane` until `close` or `abort` returns. On the receiver a block
belongs to its ticket from `expect` until `complete` or the event `Withdrawn`; only then may it be freed. On the
sender a pushed block must not change until `BlocksSent` names it, or `PushFailed` or `PushEnded` its ticket.

Ends. Receiver: `complete`, or `withdraw` -> `Withdrawn`. Sender: `finish_push`, or `cancel_push` ->
`PushEnded`, or the event `PushFailed`. Either side can end alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from kvtransfer.errors import LayoutMismatchError, PeerUnreachableError, PlaneBrokenError, PlaneClosedError
from kvtransfer.events import Event
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.meter import TransferStats
from kvtransfer.regroup import Source, TokenRun, source_blocks
from kvtransfer.road import Road, RoadContext
from kvtransfer.routes import Route
from kvtransfer.ticket import BlockHandle, Hello, PeerId, TransferTicket

logger = logging.getLogger(__name__)

# The sender takes the first of these that both sides offer.
PREFERENCE: Final = ("ucx", "nixl", "tcp", "inproc")


class Identity(NamedTuple):
    """This node, this life of it, and the fingerprint of its pool's layout."""

    node_id: str
    epoch: int
    fingerprint: str


@dataclass(frozen=True)
class PlaneStats:
    """Counters since the plane was opened, and what is open now.

    ``blocks_refused`` counts blocks that came for no ticket (any more): their bytes went nowhere.
    ``digest_failures`` counts blocks that landed and did not hold what was sent; ``digest_seconds`` is what digests
    cost on the transports' threads. ``transport`` maps each scheme to what really carried its latest bytes, as far as
    that can be learnt; ``routes`` says it of each connection, ``refused`` why peers may not be used.
    """

    bytes_sent: int
    bytes_received: int
    blocks_sent: int
    blocks_received: int
    blocks_refused: int
    digest_failures: int
    digest_seconds: float
    open_tickets: int
    open_pushes: int
    connections: int
    transport: Mapping[str, str]
    transfers: TransferStats
    routes: tuple[Route, ...]
    refused: Mapping[PeerId, str]


class KVPlane:
    """Made by `kvtransfer.select.open_plane`. All methods may be called from any thread and wait for no peer."""

    def __init__(self, context: RoadContext, roads: Mapping[str, Callable[[RoadContext], Road]]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._closed = False
        self._roads: dict[str, Road] = {}
        try:
            for scheme, open_road in roads.items():
                self._roads[scheme] = open_road(context)
        except BaseException:
            self.abort()
            raise

    @property
    def schemes(self) -> tuple[str, ...]:
        """What it offers."""
        return tuple(self._roads)

    def hello(self) -> Hello:
        """Who this plane is and where it receives.

        Ask again for each ticket: a fence after a peer's death may change an address.
        """
        self._check_open()
        context = self._context
        return Hello(
            version=WIRE_VERSION,
            node_id=context.me.node_id,
            epoch=context.me.epoch,
            fingerprint=context.fingerprint,
            block_bytes=context.block_bytes,
            num_blocks=int(context.pool.shape[0]),
            addresses={scheme: road.address() for scheme, road in self._roads.items()},
            digest=context.digester.mode,
        )

    def expect(self, ticket_id: int, handles: Sequence[BlockHandle], *, sender: tuple[str, int] | None = None) -> None:
        """Receiver: consent to exactly these blocks; from now on they belong to the ticket.

        With ``sender`` (node id, epoch) only that peer's blocks are accepted, and `peer_dead` of it withdraws
        the ticket. Without, any peer holding the ticket may fill it, one after the other if one fails.
        Raises `TicketError` if the ticket is known or a handle is out of range, double or of another ticket.
        """
        self._check_open()
        self._context.receives.open(ticket_id, tuple(handles), None if sender is None else PeerId(*sender))

    def ticket(self, ticket_id: int, handles: Sequence[BlockHandle]) -> TransferTicket:
        """Receiver: what the sender needs; call it after `expect`."""
        return TransferTicket(ticket_id, self.hello(), tuple(handles))

    def push(self, ticket: TransferTicket, items: Sequence[tuple[int, Source]]) -> None:
        """Sender: queue blocks, each an (index in the ticket, local block id). May be called once a chunk.

        To a receiver whose blocks have another size, each is an (index, `TokenRun`): the tokens of that block.
        Nothing is queued if it raises: `LayoutMismatchError` for another fingerprint, or another block size that
        nothing was made ready for,
        `TicketError` for an index or block out of range, an index pushed twice, or a push that has ended,
        `PeerUnreachableError` without a common scheme, for a peer declared dead, or one whose connection came out on
        something else than is required, `HelloError` for an address nobody can read. What fails later is the event
        `PushFailed`.
        """
        self._check_open()
        hello = ticket.hello
        runs = [source for _index, source in items if isinstance(source, TokenRun)]
        self._check_layout(hello, runs, len(items))
        if hello.peer in self._context.dead:
            raise PeerUnreachableError(f"{hello.node_id} was declared dead")
        refusal = self._context.routes.refusal(hello.peer)
        if refusal is not None:
            raise PeerUnreachableError(refusal)
        try:
            scheme = self._scheme_to(hello, regrouping=bool(runs))
        except PeerUnreachableError as error:
            self._context.routes.refuse(hello.peer, str(error))
            raise
        road = self._roads[scheme]
        road.check_address(hello.addresses[scheme])
        if self._context.device is not None and (runs or not road.on_device):
            self._context.device.to_host(source_blocks(source for _index, source in items))
        push = self._context.sends.submit(ticket, scheme, items)
        if push.queue:
            road.start(push)

    def cancel_push(self, ticket_id: int) -> None:
        """Sender: post nothing more; `PushEnded` follows when what was posted is out. Unknown is answered too."""
        self._context.sends.cancel(ticket_id)

    def finish_push(self, ticket_id: int) -> None:
        """Sender: no more chunks will come; forget the push once all its blocks are sent. Idempotent."""
        self._context.sends.finish(ticket_id)

    def withdraw(self, ticket_id: int, *, blocks_sent: int | None = None) -> None:
        """Receiver: no longer wants the ticket; `Withdrawn` follows when no byte of it can be written any more.

        No block that is not landing now can land afterwards. A landing block is waited for (UCX) or diverted
        (TCP), or its sender lets go of it (NIXL); if that hangs, `peer_dead` releases it. ``blocks_sent`` is the
        sender's `PushEnded`; it may come in a second call. The roads here know what is landing and do not need it.
        Unknown tickets are ignored.
        """
        if blocks_sent is not None and blocks_sent < 0:
            raise ValueError("blocks_sent is a count")
        if self._context.receives.withdraw(ticket_id):
            for road in self._roads.values():
                road.settle(ticket_id)

    def complete(self, ticket_id: int) -> None:
        """Receiver: all blocks arrived, the caller has them. No event. Raises `TicketError` if one is missing.

        A device's pool has them from its next step on.
        """
        in_host = self._context.receives.complete(ticket_id)
        if self._context.device is not None:
            self._context.device.from_host(in_host)

    def peer_dead(self, node_id: str, epoch: int) -> None:
        """This life of the node is over: refuse it from now on, whatever still comes from it.

        Its pushes end with `PushFailed`; tickets expected from it with `Withdrawn`, as soon as it is safe.
        """
        peer = PeerId(node_id, epoch)
        self._context.dead.add(peer)
        self._context.routes.forget(peer)
        self._context.receives.withdraw_sender(peer)
        for road in self._roads.values():
            road.peer_dead(peer)

    def fence(self, node_id: str, epoch: int) -> None:
        """End everything that is under way with this peer, by force, and start anew on the same pool.

        Its pushes end with `PushFailed`; its blocks that were landing end with `ReceiveFailed`, or, of a withdrawn
        ticket, let it end with `Withdrawn`, once nothing can touch them any more (for UCX: when the worker they went
        through is gone). The peer is not declared dead: new pushes and tickets work.
        """
        peer = PeerId(node_id, epoch)
        logger.warning("fence between this node and %s: what was under way ends now", node_id)
        for road in self._roads.values():
            road.fence(peer)

    def tick(self, now: float) -> None:
        """Call a few times a second, with seconds of the monotonic clock: `fence` peers for whom a transfer that
        nobody wants any more has been waiting for too long.

        Raises `PlaneBrokenError` if a transport has ended by itself: nothing moves over it any more.
        """
        for scheme, road in self._roads.items():
            if road.failure is not None:
                raise PlaneBrokenError(f"the transport {scheme} ended by itself: {road.failure}") from road.failure
        for peer in self._context.sends.overdue(now) | self._context.receives.overdue(now):
            self.fence(*peer)

    def computing(self) -> AbstractContextManager[None]:
        """Enter it while this node computes: the part of transfer time that this hides is counted."""
        return self._context.meter.computing()

    def poll(self) -> list[Event]:
        """Everything that happened since the last call. Works after `close` too."""
        return self._context.events.drain()

    def stats(self) -> PlaneStats:
        context = self._context
        received = context.receives.blocks_received
        return PlaneStats(
            bytes_sent=context.sends.bytes_sent,
            bytes_received=received * context.block_bytes,
            blocks_sent=context.sends.blocks_sent,
            blocks_received=received,
            blocks_refused=context.receives.blocks_refused,
            digest_failures=context.digester.failures,
            digest_seconds=context.digester.seconds,
            open_tickets=context.receives.open_tickets,
            open_pushes=context.sends.open_pushes,
            connections=sum(road.connections() for road in self._roads.values()),
            transfers=context.meter.stats(),
            transport=MappingProxyType({scheme: road.transport() for scheme, road in self._roads.items()}),
            routes=context.routes.open(),
            refused=MappingProxyType(self.refused()),
        )

    def refused(self) -> dict[PeerId, str]:
        """Lives of peers that cannot be reached as they must be, and why; those declared dead excepted."""
        return self._context.routes.refused()

    def close(self) -> None:
        """Send what is queued, for at most a few seconds, then `abort`."""
        self._end(flush=True)

    def abort(self) -> None:
        """End now. Open pushes fail, open tickets are withdrawn; no thread, socket or fd is left, and nothing here
        reads or writes the pool any more. Idempotent, like `close`."""
        self._end(flush=False)

    def _end(self, *, flush: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for road in self._roads.values():
            road.close(flush=flush)
        for push in self._context.sends.all_pushes():
            self._context.sends.fail(push, "the plane was closed")
        self._context.receives.withdraw_all()

    def _check_layout(self, hello: Hello, runs: Sequence[TokenRun], num_items: int) -> None:
        context = self._context
        regrouper = context.regrouper if len(runs) == num_items else None
        if hello.fingerprint != context.fingerprint or (
            hello.block_bytes != context.block_bytes
            and (regrouper is None or regrouper.block_size(hello.block_bytes) is None)
        ):
            raise LayoutMismatchError(
                f"{hello.node_id} holds blocks {hello.fingerprint} of {hello.block_bytes} bytes, "
                f"this node {context.fingerprint} of {context.block_bytes}"
            )
        for run in runs:
            if context.regrouper is None:
                raise LayoutMismatchError("this plane was opened without a layout: it sends whole blocks only")
            context.regrouper.check(run, hello.block_bytes)

    def _scheme_to(self, hello: Hello, *, regrouping: bool) -> str:
        for scheme in PREFERENCE:
            road = self._roads.get(scheme)
            if road is not None and scheme in hello.addresses and (road.regroups or not regrouping):
                return scheme
        required = self._context.routes.required
        demand = "" if required is None else f" and requires {required}"
        sizes = "; its blocks have another size, which not every transport can send" if regrouping else ""
        raise PeerUnreachableError(
            f"{hello.node_id} offers {sorted(hello.addresses)}, this node {sorted(self._roads)}{demand}{sizes}"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise PlaneClosedError("the plane is closed")
