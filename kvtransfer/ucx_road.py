"""The UCX road: a sending worker, a receiving worker, retired ones of both, one kv-io thread that owns them all."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from kvtransfer.host import is_loopback
from kvtransfer.road import Road, RoadContext
from kvtransfer.sends import Push
from kvtransfer.ticket import PeerId
from kvtransfer.ucx import Context, UcxError
from kvtransfer.ucx_hearing import HearingTest
from kvtransfer.ucx_inbound import Intake
from kvtransfer.ucx_offers import PeerMemories
from kvtransfer.ucx_sender import Sender
from kvtransfer.ucx_wire import open_address, worker_name

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 5.0
# While a retired worker or a failed endpoint waits for its end, somebody must look.
_LOOK_S: Final = 0.02
# While blocks go one after the other we look by the clock: who sleeps has to be woken by the other end for each of
# them. (Measured, 64 blocks of 512 KiB, in turns: over shared memory 11.9 GB/s and 125 ms of CPU a GB at both ends,
# 11.1 and 162 without; over TCP 4.8 and 360, 4.7 and 410 without.)
_NAP_S: Final = 0.00005
_MAX_IDLE_NAPS: Final = 20


class UcxRoad(Road):
    """Raises `TransportUnavailableError` without ucxx, or off loopback without a secret."""

    regroups = True

    def __init__(self, context: RoadContext) -> None:
        self._ucx = Context(loopback_only=is_loopback(context))
        if context.device is not None:
            self.on_device = self._ucx.knows_cuda
            where = "as they are" if self.on_device else "through host memory: UCX knows no GPU here"
            logger.info("blocks of the GPU's pool go %s", where)
        self._context = context = context.to_device() if self.on_device else context
        self._sender = Sender(self._ucx, context)
        self._old_senders: list[Sender] = []
        self._memories = PeerMemories(context)
        self._intake = Intake(self._ucx, context, self._memories)
        self._retired: list[Intake] = []
        self._hearing_tests: list[HearingTest] = []
        self._address = self._intake.address
        # Names of peers' workers that are gone: a ticket may still lead there.
        self._gone: deque[bytes] = deque(maxlen=1024)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._ended = False
        self._stop_at: float | None = None
        self._num_moved = 0
        self._idle_naps = 0
        self._has_more = False
        self._selector = selectors.DefaultSelector()
        for fd in (self._wake_read.fileno(), self._sender.worker.fd, self._intake.worker.fd):
            self._selector.register(fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kv-io-ucx", daemon=True)
        self._thread.start()

    def address(self) -> bytes:
        return self._address

    def check_address(self, address: bytes) -> None:
        open_address(self._context.secret, address)

    def start(self, push: Push) -> None:
        if not self._post(partial(self._start, push)):
            self._context.sends.fail(push, "the plane was closed")

    def settle(self, ticket_id: int) -> None:
        """Blocks that are landing cannot be stopped; they give their claims back when they have landed."""

    def peer_dead(self, peer: PeerId) -> None:
        self._post(partial(self._drop_peer, peer))

    def connections(self) -> int:
        return sum(sender.num_links for sender in (self._sender, *self._old_senders))

    def transport(self) -> str:
        return self._transports() or "ucx, nothing sent yet"

    def close(self, *, flush: bool) -> None:
        self._post(partial(self._stop, _FLUSH_S if flush else 0.0))
        self._thread.join()

    def _transports(self) -> str:
        return next((s.transports for s in (self._sender, *self._old_senders) if s.transports), "")

    # ---- kv-io thread from here on

    def _run(self) -> None:
        try:
            if self.on_device and self._context.device is not None:
                self._context.device.use_here()
            while not self._may_stop():
                self._turn()
                self._sleep()
        except Exception as error:
            logger.exception("a bug ended the thread of kv transfers")
            self.failure = error
        finally:
            self._tear_down()

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._turn_senders()
        more = [intake.turn() for intake in (self._intake, *self._retired)]
        self._has_more = any(more)
        if self._intake.needs_fence:
            self._retire()
        self._test_hearing()
        for intake in [intake for intake in self._retired if intake.is_over()]:
            self._end(intake, "its sender is gone")
        self._context.events.wake()

    def _test_hearing(self) -> None:
        for test in self._hearing_tests[:]:
            is_there = test.intake in self._retired
            if is_there and not test.is_over():
                continue
            self._hearing_tests.remove(test)
            test.end()
            if is_there and not test.intake.hears:
                logger.warning("a lost peer has left a UCX worker deaf: it ends, and its senders are told")
                self._end(test.intake, "the worker heard nobody any more")
        for intake in self._retired:
            if intake.may_be_deaf:
                self._hearing_tests.append(HearingTest(self._ucx, intake))

    def _end(self, intake: Intake, reason: str) -> None:
        self._retired.remove(intake)
        self._selector.unregister(intake.worker.fd)
        intake.destroy(reason)

    def _turn_senders(self) -> None:
        for sender in (self._sender, *self._old_senders):
            for name in sender.turn():
                self._gone.append(name)
                for other in (self._sender, *self._old_senders):
                    other.lose_worker(name)
        if self._sender.needs_fence:
            old, self._sender = self._sender, Sender(self._ucx, self._context)
            self._selector.register(self._sender.worker.fd, selectors.EVENT_READ)
            old.retire()
            self._old_senders.append(old)
            logger.info("a peer hangs or is lost: new UCX worker for sending, the old one is retired")
        for sender in [sender for sender in self._old_senders if sender.is_over()]:
            self._old_senders.remove(sender)
            self._selector.unregister(sender.worker.fd)
            sender.destroy(None)

    def _sleep(self) -> None:
        if self._has_more:
            return
        if self._may_nap():
            time.sleep(_NAP_S)
            return
        workers = [sender.worker for sender in (self._sender, *self._old_senders)]
        workers += [intake.worker for intake in (self._intake, *self._retired)]
        if not all(worker.arm() for worker in workers):
            return
        waiting = self._retired or self._old_senders or self._sender.is_closing or self._stop_at is not None
        timeout = _LOOK_S if waiting else None
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake_read.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)

    def _may_nap(self) -> bool:
        """Whether the next block will have gone over in a moment, as those before it did."""
        busy = self._sender.busy or self._intake.busy
        num_moved = self._context.sends.blocks_sent + self._context.receives.blocks_received
        if not busy or num_moved != self._num_moved:
            self._num_moved, self._idle_naps = num_moved, 0
        self._idle_naps += 1
        return busy and self._idle_naps <= _MAX_IDLE_NAPS

    def _retire(self) -> None:
        old = self._intake
        self._intake = Intake(self._ucx, self._context, self._memories)
        self._selector.register(self._intake.worker.fd, selectors.EVENT_READ)
        # The new address first: then only tickets that are open now can name the old one.
        self._address = self._intake.address
        old.retire()
        self._retired.append(old)
        logger.info("a kv receive broke off, or a sender is lost: new UCX worker, the old one is retired")

    def _start(self, push: Push) -> None:
        if push.over:
            return
        if push.peer in self._context.dead:
            self._context.sends.fail(push, "the peer was declared dead")
            return
        if worker_name(push.address) in self._gone:
            self._context.sends.fail(push, "the receiver has closed this address")
            return
        try:
            self._sender.start(push)
        except UcxError as error:
            self._context.sends.fail(push, f"cannot connect: {error}")

    def _drop_peer(self, peer: PeerId) -> None:
        for sender in (self._sender, *self._old_senders):
            sender.drop_peer(peer, "the peer was declared dead")
        for push in self._context.sends.pushes_to(peer, "ucx"):
            self._context.sends.fail(push, "the peer was declared dead")
        for intake in (self._intake, *self._retired):
            intake.peer_dead(peer)
        self._memories.forget(peer)

    def _stop(self, flush_s: float) -> None:
        self._stop_at = time.monotonic() + flush_s

    def _may_stop(self) -> bool:
        if self._stop_at is None:
            return False
        return time.monotonic() >= self._stop_at or not any(
            sender.busy for sender in (self._sender, *self._old_senders)
        )

    def _tear_down(self) -> None:
        with self._lock:
            self._ended = True
        for test in self._hearing_tests:
            test.end()
        for intake in (self._intake, *self._retired):
            intake.destroy("the plane was closed")
        self._memories.clear()
        for sender in (self._sender, *self._old_senders):
            sender.destroy("the plane was closed")
        self._commands.clear()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
        self._context.events.wake()

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
