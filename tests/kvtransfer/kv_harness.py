"""What the kvtransfer tests share: a node that owns a pool, and nodes in processes of their own."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import numpy as np

from kvtransfer import ucx
from kvtransfer.digest import Digester, DigestMode
from kvtransfer.events import BlocksArrived, BlocksSent, Event
from kvtransfer.layout import BlockLayout
from kvtransfer.plane import KVPlane
from kvtransfer.routes import TransportKind
from kvtransfer.select import open_plane
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.ticket import BlockHandle, TransferTicket, decode_ticket, encode_ticket, new_ticket_id
from kvtransfer.vendor import leave

# NIXL cannot live in one process with UCXX: `test_kv_nixl` runs these suites again in a process with this set.
ENV_SCHEME = "BATON_TEST_KV_SCHEME"
# A pool that receivers copy from themselves, and one that is offered in vain.
MAPPED, UNREADABLE = "ucx-mapped", "ucx-unreadable"
# A GPU's pool whose blocks UCX takes as they are. Host memory plays the GPU: UCX finds out by itself what it is.
DIRECT = "ucx-direct"
SCHEMES = ("nixl",) if os.environ.get(ENV_SCHEME) == "nixl" else ("inproc", "tcp", "ucx", MAPPED, UNREADABLE, DIRECT)
DEADLINE_S = 20.0
FINGERPRINT = "layout-a"
SECRET = b"shared by all nodes"


class Row:
    """What a tensor on a GPU shows of itself."""

    def __init__(self, array: np.ndarray) -> None:
        data = (array.ctypes.data, False)
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": "|u1", "data": data, "version": 3}


class PlayedGpu:
    """A `DevicePool` in host memory. ``staged`` lists the blocks that went by way of the twin."""

    def __init__(self, pool: np.ndarray, twin: np.ndarray) -> None:
        self.pool, self.twin = pool, twin
        self.staged: list[int] = []

    def row(self, block_id: int) -> Row:
        return Row(self.pool[block_id])

    def read(self, block_ids: Sequence[int], lines: np.ndarray | None) -> np.ndarray:
        blocks = self.pool[list(block_ids)]
        if lines is None:
            return blocks
        return np.take_along_axis(blocks.reshape(len(blocks), -1, 64), lines[:, :, None], axis=1)

    def to_host(self, block_ids: Sequence[int]) -> None:
        self.staged += block_ids
        self.twin[list(block_ids)] = self.pool[list(block_ids)]

    def from_host(self, block_ids: Sequence[int]) -> None:
        self.staged += block_ids
        self.pool[list(block_ids)] = self.twin[list(block_ids)]

    def use_here(self) -> None:
        pass


class Node:
    """A pool and its plane. ``seen`` keeps every event in order. Schemes may be followed by how the pool is shared."""

    def __init__(
        self,
        schemes: str | Sequence[str],
        node_id: str,
        *,
        epoch: int = 1,
        num_blocks: int = 16,
        block_bytes: int = 4096,
        fingerprint: str = FINGERPRINT,
        secret: bytes | None = SECRET,
        seed: int | None = None,
        digest: DigestMode = "full",
        layout: BlockLayout | None = None,
        require: TransportKind | None = None,
        gpu: bool = False,
    ) -> None:
        self.id, self.epoch = node_id, epoch
        block_bytes = block_bytes if layout is None else layout.block_bytes
        names = (schemes,) if isinstance(schemes, str) else schemes
        self.memory = shared_memory(num_blocks * block_bytes, names[0])
        self.pool = np.zeros((num_blocks, block_bytes), np.uint8)
        if self.memory is not None:
            self.pool = np.frombuffer(self.memory.buffer, np.uint8).reshape(self.pool.shape)
        twin = self.pool
        self.device: PlayedGpu | None = None
        if gpu or names[0] == DIRECT:
            self.pool = np.zeros_like(twin)
            self.device = PlayedGpu(self.pool, twin)
        if seed is not None:
            self.pool[:] = np.random.default_rng(seed).integers(0, 256, self.pool.shape, np.uint8)
        self.seen: list[Event] = []
        self._ready = threading.Event()
        identity = (node_id, epoch, fingerprint)
        self.plane = _open(
            names[0] == DIRECT,
            [name.partition("-")[0] for name in names],
            twin,
            identity,
            secret=secret,
            wakeup=self._ready.set,
            digest=digest,
            layout=layout,
            require=require,
            memory=self.memory,
            device=self.device,
        )

    def digesters(self) -> list[Digester]:
        """Of all roads: one that takes a GPU's blocks as they are has its own."""
        return [road._context.digester for road in self.plane._roads.values()]

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Collect events until the condition holds; fails with what was seen at the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self._ready.clear()
            self.seen += self.plane.poll()
            if condition():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {DEADLINE_S} s; {self.plane.stats()}; last {self.seen[-20:]}")
            self._ready.wait(0.05)

    def wait_event(self, event: Event) -> None:
        self.wait_for(lambda: event in self.seen)

    def wait_kind(self, kind: type[Event], ticket_id: int) -> Event:
        found: list[Event] = []

        def arrived() -> bool:
            found.extend(e for e in self.seen if isinstance(e, kind) and e.ticket_id == ticket_id)
            return bool(found)

        self.wait_for(arrived)
        return found[0]

    def arrived(self, ticket_id: int) -> set[int]:
        return self._indexes(BlocksArrived, ticket_id)

    def sent(self, ticket_id: int) -> set[int]:
        return self._indexes(BlocksSent, ticket_id)

    def grant(self, blocks: Sequence[int], *, sender: Node | tuple[str, int] | None = None) -> TransferTicket:
        """Expect a new ticket for these blocks; the ticket goes through its encoding, as in life."""
        ticket_id = new_ticket_id()
        handles = [BlockHandle(block, 7) for block in blocks]
        peer = (sender.id, sender.epoch) if isinstance(sender, Node) else sender
        self.plane.expect(ticket_id, handles, sender=peer)
        return decode_ticket(encode_ticket(self.plane.ticket(ticket_id, handles)))

    def close(self) -> None:
        self.plane.close()

    def _indexes(self, kind: type[BlocksArrived] | type[BlocksSent], ticket_id: int) -> set[int]:
        events = [e for e in self.seen if isinstance(e, kind) and e.ticket_id == ticket_id]
        listed = [index for event in events for index in event.indexes]
        assert len(listed) == len(set(listed)), "a block was reported twice"
        return set(listed)


def _open(direct: bool, *arguments: Any, **options: Any) -> KVPlane:
    if not direct:
        return open_plane(*arguments, **options)
    with patch.object(ucx.Context, "knows_cuda", True):
        return open_plane(*arguments, **options)


def shared_memory(num_bytes: int, scheme: str) -> SharedMemory | None:
    """What ``scheme`` says of the pool."""
    if scheme not in (MAPPED, UNREADABLE):
        return None
    memory = SharedMemory(num_bytes)
    if scheme == UNREADABLE:
        memory.name = replace(memory.name, token=bytes(16))
    return memory


def works(p: Node, d: Node, block: int) -> None:
    """A new ticket goes through, whatever was before."""
    ticket = d.grant([block], sender=p)
    p.plane.push(ticket, [(0, 5)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[block], p.pool[5])
    d.plane.complete(ticket.ticket_id)
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})
    p.plane.finish_push(ticket.ticket_id)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def io_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-io")]


class Remote:
    """A node in a process of its own, driven by (method, arguments); see `_serve`."""

    def __init__(self, scheme: str, node_id: str, **options: object) -> None:
        context = mp.get_context("spawn")
        self.id, self.epoch = node_id, 1
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, scheme, node_id, options), daemon=True)
        self.process.start()
        theirs.close()
        assert self.call("ready") is True

    def start(self, name: str, *arguments: object) -> None:
        self._pipe.send((name, arguments))

    def result(self) -> object:
        assert self._pipe.poll(DEADLINE_S), "the remote node does not answer"
        return self._pipe.recv()

    def call(self, name: str, *arguments: object) -> object:
        self.start(name, *arguments)
        return self.result()

    def stop(self) -> None:
        if self.process.is_alive():
            with suppress(OSError):
                self._pipe.send(("stop", ()))
        self.process.join(DEADLINE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()
        self.process.close()


@contextmanager
def remote(scheme: str, node_id: str, **options: object):
    node = Remote(scheme, node_id, **options)
    try:
        yield node
    finally:
        node.stop()


def _serve(pipe: Connection, scheme: str, node_id: str, options: dict) -> None:
    node = Node(scheme, node_id, **options)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        if name == "stop":
            break
        pipe.send(_answer(node, name, arguments))
    node.close()
    leave(0)


def _answer(node: Node, name: str, arguments: tuple) -> object:
    if name == "ready":
        return True
    if name == "push":
        data, items = arguments
        ticket = decode_ticket(data)
        node.plane.push(ticket, items)
        return True
    if name == "wait_sent":
        ticket_id, count = arguments
        node.wait_for(lambda: len(node.sent(ticket_id)) >= count)
        return True
    if name == "grant":
        return encode_ticket(node.grant(*arguments))
    if name == "wait_arrived":
        ticket_id, count = arguments
        node.wait_for(lambda: len(node.arrived(ticket_id)) >= count)
        return True
    if name == "block":
        return node.pool[arguments[0]].tobytes()
    raise AssertionError(name)
