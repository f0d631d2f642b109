"""Two processes on two cores, each with a KV pool: they move blocks over a transport, or over a bare socket.

Both read the same monotonic clock, so that a transfer is timed from the push in one to the last block that its owner
hears of in the other.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtransfer.pacing import unpace
from kvtransfer.shared_memory import SharedMemory

Buffer = npt.NDArray[np.uint8]

DEADLINE_S: Final = 60.0
_SECRET: Final = b"both ends of one benchmark"


@dataclass(frozen=True, slots=True)
class Road:
    """A transport under test; ``required`` makes it fail rather than measure another one."""

    name: str
    scheme: str
    required: str
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """``count`` scattered blocks of ``block_bytes``, ``repeats`` times in turn."""

    block_bytes: int
    count: int
    repeats: int

    @property
    def num_bytes(self) -> int:
        """In all repeats."""
        return self.block_bytes * self.count * self.repeats


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall seconds of all repeats; CPU seconds of both processes; of those, what digests took."""

    seconds: float
    cpu_seconds: float
    digest_seconds: float = 0.0


class End:
    """One process. It is told what to do by (method, arguments); see `_Worker`."""

    def __init__(self, name: str, cpu: int, pool_bytes: int, peer: Connection, sock: socket.socket) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        setup = (name, cpu, pool_bytes, peer, sock)
        self._process = context.Process(target=_serve, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: str, *arguments: object) -> None:
        """Do it; `result` says when it is done."""
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        """Of the oldest start. Raises RuntimeError with what went wrong there."""
        if not self._pipe.poll(DEADLINE_S):
            raise RuntimeError("an end of the benchmark does not answer")
        done, value = self._pipe.recv()
        if not done:
            raise RuntimeError(value)
        return value

    def call(self, method: str, *arguments: object) -> Any:
        """Start it and wait."""
        self.start(method, *arguments)
        return self.result()

    def stop(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(("stop", ()))
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


class Ends:
    """A sender and a receiver; use as ``with``. One road at a time, and one kind of road for the processes' life."""

    def __init__(self, cpus: Sequence[int], pool_bytes: int) -> None:
        one, other = mp.get_context("spawn").Pipe()
        ours, theirs = _socket_pair()
        self._sender = End("P", cpus[0], pool_bytes, one, ours)
        self._receiver = End("D", cpus[-1], pool_bytes, other, theirs)
        for thing in (one, other, ours, theirs):
            thing.close()

    def __enter__(self) -> Ends:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender.stop()
        self._receiver.stop()

    @contextmanager
    def road(self, road: Road, block_bytes: int, num_blocks: int, digest: str) -> Any:
        """Planes over the pools, cut into such blocks."""
        for end in (self._receiver, self._sender):
            end.call("open", road, block_bytes, num_blocks, digest)
        try:
            yield self
        finally:
            for end in (self._sender, self._receiver):
                end.call("close")

    def transfer(self, shape: Shape) -> Timing:
        """Blocks from pool to pool over the open road."""
        return self._both("send", "receive", shape)

    def raw_socket(self, shape: Shape) -> Timing:
        """The same bytes over a connected TCP socket, each block one `sendall` and one `recv_into`."""
        return self._both("send_raw", "receive_raw", shape)

    def memcpy(self, shape: Shape) -> Timing:
        """The same blocks copied by one core from one memory to another."""
        return Timing(*self._receiver.call("copy", shape))

    def _both(self, send: str, receive: str, shape: Shape) -> Timing:
        self._receiver.start(receive, shape)
        self._sender.start(send, shape)
        ended, receiver_cpu, receiver_digest = self._receiver.result()
        began, sender_cpu, sender_digest = self._sender.result()
        seconds = sum(end - begin for begin, end in zip(began, ended, strict=True))
        return Timing(seconds, sender_cpu + receiver_cpu, sender_digest + receiver_digest)


class _Worker:
    """What an end does, in its own process. Times are `perf_counter`, the same clock in both."""

    def __init__(self, name: str, cpu: int, pool_bytes: int, peer: Connection, sock: socket.socket) -> None:
        os.sched_setaffinity(0, {cpu})
        self._name, self._peer, self._sock = name, peer, sock
        self._shared = SharedMemory(pool_bytes) if name == "P" else None
        self._memory = _memory(pool_bytes, self._shared)
        self._source: Buffer | None = None
        self._plane: Any = None
        self._pool: Buffer = self._memory.reshape(1, -1)
        self._news = threading.Event()

    def open(self, road: Road, block_bytes: int, num_blocks: int, digest: str) -> None:
        os.environ.update(road.environment)
        from kvtransfer.select import open_plane

        self._pool = self._memory[: block_bytes * num_blocks].reshape(num_blocks, block_bytes)
        self._plane = open_plane(
            [road.scheme],
            self._pool,
            (self._name, 1, "benchmark"),
            secret=_SECRET,
            wakeup=self._news.set,
            digest=digest,  # type: ignore[arg-type]  # one of the benchmark's own constants
            require=road.required,  # type: ignore[arg-type]
            memory=self._shared,
        )

    def close(self) -> None:
        self._plane.close()

    def send(self, shape: Shape) -> tuple[list[float], float, float]:
        from kvtransfer.events import BlocksSent, PushFailed
        from kvtransfer.ticket import decode_ticket

        began, cpu, digest = [], time.process_time(), self._plane.stats().digest_seconds
        items = list(enumerate(self._scattered(shape, seed=1)))
        for _ in range(shape.repeats):
            ticket = decode_ticket(self._peer.recv_bytes())
            began.append(time.perf_counter())
            self._plane.push(ticket, items)
            self._wait(BlocksSent, shape.count, PushFailed)
            self._plane.finish_push(ticket.ticket_id)
        spent = time.process_time() - cpu
        return began, spent, self._plane.stats().digest_seconds - digest

    def receive(self, shape: Shape) -> tuple[list[float], float, float]:
        from kvtransfer.events import BlocksArrived, ReceiveFailed
        from kvtransfer.ticket import BlockHandle, encode_ticket, new_ticket_id

        ended, cpu, digest = [], time.process_time(), self._plane.stats().digest_seconds
        handles = [BlockHandle(block, 1) for block in self._scattered(shape, seed=2)]
        for _ in range(shape.repeats):
            ticket_id = new_ticket_id()
            self._plane.expect(ticket_id, handles)
            self._peer.send_bytes(encode_ticket(self._plane.ticket(ticket_id, handles)))
            self._wait(BlocksArrived, shape.count, ReceiveFailed)
            ended.append(time.perf_counter())
            self._plane.complete(ticket_id)
        spent = time.process_time() - cpu
        return ended, spent, self._plane.stats().digest_seconds - digest

    def send_raw(self, shape: Shape) -> tuple[list[float], float, float]:
        began, cpu = [], time.process_time()
        order = self._scattered(shape, seed=1)
        for _ in range(shape.repeats):
            self._peer.recv_bytes()
            began.append(time.perf_counter())
            for block in order:
                self._sock.sendall(self._pool[block])
        return began, time.process_time() - cpu, 0.0

    def receive_raw(self, shape: Shape) -> tuple[list[float], float, float]:
        ended, cpu = [], time.process_time()
        order = self._scattered(shape, seed=2)
        for _ in range(shape.repeats):
            self._peer.send_bytes(b"go")
            for block in order:
                target = memoryview(self._pool[block])
                while target:
                    target = target[self._sock.recv_into(target) :]
            ended.append(time.perf_counter())
        return ended, time.process_time() - cpu, 0.0

    def copy(self, shape: Shape) -> tuple[float, float]:
        if self._source is None:
            self._source = _memory(len(self._memory))
        source = self._source[: self._pool.size].reshape(self._pool.shape)
        pairs = list(zip(self._scattered(shape, seed=1), self._scattered(shape, seed=2), strict=True))
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(shape.repeats):
            for theirs, ours in pairs:
                self._pool[ours] = source[theirs]
        return time.perf_counter() - began, time.process_time() - cpu

    def _scattered(self, shape: Shape, seed: int) -> list[int]:
        order = np.random.default_rng(seed).permutation(len(self._pool))[: shape.count]
        return [int(block) for block in order]

    def _wait(self, kind: type, count: int, failure: type) -> None:
        until = time.monotonic() + DEADLINE_S
        while count > 0:
            self._news.wait(1.0)
            self._news.clear()
            for event in self._plane.poll():
                if isinstance(event, failure):
                    raise RuntimeError(event.reason)  # type: ignore[attr-defined]
                if isinstance(event, kind):
                    count -= len(event.indexes)  # type: ignore[attr-defined]
            if time.monotonic() > until:
                raise RuntimeError(f"{count} blocks are missing")


def _serve(pipe: Connection, setup: tuple[str, int, int, Connection, socket.socket]) -> None:
    worker = _Worker(*setup)
    while True:
        method, arguments = pipe.recv()
        if method == "stop":
            break
        act: Callable[..., Any] = getattr(worker, method)
        try:
            pipe.send((True, act(*arguments)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other process must hear of it
            pipe.send((False, f"{type(error).__name__}: {error}"))
    from kvtransfer.vendor import leave

    leave(0)


def _memory(num_bytes: int, shared: SharedMemory | None = None) -> Buffer:
    """As a node's pool, every page of it touched: anonymous memory on huge pages, or what a prefill node shares."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if shared is None else shared.buffer
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array: Buffer = np.frombuffer(memory, np.uint8)
    array[:] = np.tile(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), -(-num_bytes >> 20))[:num_bytes]
    return array


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace(end)
    return ours, theirs
