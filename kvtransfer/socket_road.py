"""A road made of sockets, with one kv-io thread for all of them. What is said on a socket is its dialect.

Commands from the owner's thread are queued and run on the kv-io thread, so connections need no lock. A fault
of a peer, or of whoever connects to the port, closes that one connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvtransfer import tcp_wire as wire
from kvtransfer.connection import Connection, InboundConnection, OutboundConnection
from kvtransfer.errors import TransportUnavailableError
from kvtransfer.road import Road, RoadContext
from kvtransfer.sends import Push
from kvtransfer.ticket import Hello, PeerId

logger = logging.getLogger(__name__)

_MAX_INBOUND: Final = 256
_MAX_UNPROVEN: Final = 32
_FLUSH_S: Final = 5.0
_ACCEPT_PAUSE_S: Final = 0.5
# A selector rounds up to this; a connection that polls wants to be called sooner.
_SELECTOR_S: Final = 0.001
# Nearer than this it is not worth a sleep; the core is offered to whoever wants it.
_YIELD_S: Final = 0.0001


@dataclass(frozen=True)
class Dialect:
    """What a road's sockets speak: makes a connection of a socket that came in, or towards a receiver.

    Both take the monotonic time; ``outbound`` raises OSError if it cannot connect. See `Road` for ``regroups``.
    """

    scheme: str
    inbound: Callable[[socket.socket, RoadContext, float], InboundConnection]
    outbound: Callable[[Hello, RoadContext, float], OutboundConnection]
    regroups: bool = False


class SocketRoad(Road):
    """Listens from construction on. Raises `TransportUnavailableError` if it may not or cannot bind."""

    def __init__(self, context: RoadContext, dialect: Dialect) -> None:
        self._context = context
        self._dialect = dialect
        self.regroups = dialect.regroups
        self._listener, self._address = _listen(context)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._ended = False
        self._stop_at: float | None = None
        self._accept_again_at: float | None = None
        self._connections: dict[Connection, None] = {}
        self._outbound: dict[tuple[PeerId, bytes], OutboundConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"kv-io-{dialect.scheme}", daemon=True)
        self._thread.start()

    def address(self) -> bytes:
        return self._address

    def check_address(self, address: bytes) -> None:
        wire.parse_address(address)

    def start(self, push: Push) -> None:
        if not self._post(partial(self._start, push)):
            self._context.sends.fail(push, "the plane was closed")

    def settle(self, ticket_id: int) -> None:  # noqa: ARG002 - cheaper to look at every landing block
        self._post(self._settle_withdrawn)

    def peer_dead(self, peer: PeerId) -> None:
        self._post(partial(self._drop_peer, peer))

    def connections(self) -> int:
        return len(self._connections)

    def transport(self) -> str:
        return self._dialect.scheme

    def close(self, *, flush: bool) -> None:
        self._post(partial(self._stop, _FLUSH_S if flush else 0.0))
        self._thread.join()

    # ---- kv-io thread from here on

    def _run(self) -> None:
        try:
            while not self._may_stop():
                self._turn()
        except Exception as error:
            logger.exception("a bug ended the thread of kv transfers")
            self.failure = error
        finally:
            self._tear_down()

    def _turn(self) -> None:
        ready = self._select()
        now = time.monotonic()
        for key, _ in ready:
            if key.fileobj is self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
            elif key.fileobj is self._listener:
                self._accept(now)
            elif key.data in self._connections:
                self._guarded(key.data, partial(key.data.on_ready, now))
        while self._commands:
            self._commands.popleft()()
        for connection in [c for c in self._connections if c.deadline is not None and c.deadline <= now]:
            self._guarded(connection, connection.on_deadline)
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _select(self) -> list[tuple[selectors.SelectorKey, int]]:
        timeout_s = self._timeout_s()
        if timeout_s is None or not 0 < timeout_s < _SELECTOR_S:
            return self._selector.select(timeout_s)
        ready = self._selector.select(0)
        if not ready and not self._commands:
            # A sleep takes twice as long at least.
            if timeout_s <= _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(timeout_s)
        return ready

    def _timeout_s(self) -> float | None:
        times = [c.deadline for c in self._connections if c.deadline is not None]
        times += [t for t in (self._stop_at, self._accept_again_at) if t is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _guarded(self, connection: Connection, action: Callable[[], None]) -> None:
        """Run it; whatever the peer did wrong costs it this connection and nobody else anything."""
        try:
            action()
        except (wire.WireError, OSError) as error:
            logger.info("kv connection with %s closed: %s", connection.peer, error)
            self._drop(connection, f"connection lost: {error}")
        else:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ
        if connection.wants_write:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: Connection, reason: str) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.sock)
        if isinstance(connection, OutboundConnection):
            del self._outbound[connection.peer, connection.address]
        lost = connection.lost_event()
        if lost is not None and self._stop_at is None and connection.peer not in self._context.dead:
            self._context.events.put(lost)
        connection.close(reason)
        self._context.events.wake()

    def _accept(self, now: float) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of fds: the connection stays in the backlog and would wake us at once again.
                logger.warning("cannot accept kv connections: %s", error)
                self._selector.unregister(self._listener)
                self._accept_again_at = now + _ACCEPT_PAUSE_S
                return
            if not self._make_room():
                sock.close()
                continue
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = self._dialect.inbound(sock, self._context, now)
            except OSError:
                sock.close()
                continue
            self._connections[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _make_room(self) -> bool:
        inbound = [c for c in self._connections if isinstance(c, InboundConnection)]
        unproven = [c for c in inbound if not c.proven]
        # The oldest stranger goes first: strangers must not be able to keep peers out.
        if unproven and (len(unproven) >= _MAX_UNPROVEN or len(inbound) >= _MAX_INBOUND):
            self._drop(unproven[0], "too many connections")
            return True
        return len(inbound) < _MAX_INBOUND

    def _start(self, push: Push) -> None:
        hello = push.ticket.hello
        if push.over:
            return
        if hello.peer in self._context.dead:
            self._context.sends.fail(push, "the peer was declared dead")
            return
        link = self._outbound.get((hello.peer, push.address))
        if link is None:
            try:
                link = self._dialect.outbound(hello, self._context, time.monotonic())
            except OSError as error:
                self._context.sends.fail(push, f"cannot connect: {error}")
                return
            self._outbound[link.peer, link.address] = link
            self._connections[link] = None
            self._selector.register(link.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        self._guarded(link, partial(link.add, push))

    def _settle_withdrawn(self) -> None:
        for connection in list(self._connections):
            if isinstance(connection, InboundConnection):
                self._guarded(connection, connection.settle_withdrawn)

    def _drop_peer(self, peer: PeerId) -> None:
        for connection in [c for c in self._connections if c.peer == peer]:
            self._drop(connection, "the peer was declared dead")
        for push in self._context.sends.pushes_to(peer, self._dialect.scheme):
            self._context.sends.fail(push, "the peer was declared dead")
        self._settle_withdrawn()

    def _stop(self, flush_s: float) -> None:
        self._stop_at = time.monotonic() + flush_s

    def _may_stop(self) -> bool:
        if self._stop_at is None:
            return False
        return time.monotonic() >= self._stop_at or not any(link.busy for link in self._outbound.values())

    def _tear_down(self) -> None:
        with self._lock:
            self._ended = True
        self._stop_at = self._stop_at or time.monotonic()
        for connection in list(self._connections):
            self._drop(connection, "the plane was closed")
        # Commands that lost the race: pushes among them are failed by the plane, the rest has no meaning now.
        self._commands.clear()
        self._selector.close()
        self._listener.close()
        self._wake_read.close()
        self._wake_write.close()

    # ---- either thread

    def _post(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._commands.append(command)
            # A full pipe means the thread has been woken already.
            with contextlib.suppress(BlockingIOError):
                self._wake_write.send(b"\0")
        return True


def _listen(context: RoadContext) -> tuple[socket.socket, bytes]:
    try:
        family, _, _, _, where = socket.getaddrinfo(context.host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise TransportUnavailableError(f"cannot resolve {context.host!r}") from error
    ip = ipaddress.ip_address(where[0])
    if ip.is_unspecified:
        raise TransportUnavailableError("bind an address that peers can reach, not a wildcard")
    if not ip.is_loopback and not context.secret:
        raise TransportUnavailableError("without a shared secret only a loopback address may be bound")
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise TransportUnavailableError(f"cannot bind {context.host}: {error}") from error
    return listener, wire.format_address(str(ip), listener.getsockname()[1])
