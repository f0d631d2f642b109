"""The one file that knows ucxx. Wraps its low-level API; everything here runs on one thread, the road's kv-io.

Receiving works by probing: nothing is posted ahead. A message that arrived is matched by `Worker.probe`, and
only then the road decides where it may go: into the one block it names, or, if nobody consented to it, into a
single byte. UCX answers the latter with "truncated" and the sender sees its send complete, without the payload
ever crossing. So no stray sender can fill our memory, and we know exactly which receives are matched, which is
what a withdrawal has to wait for; UCX itself cannot cancel a matched receive.
(Measured, 64 blocks of 720 KiB: 6.1 GB/s over shared memory, 2.5 over TCP; posted ahead 6.4 and 3.0.)
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtransfer import vendor
from kvtransfer.errors import KVTransferError, TransportUnavailableError

Buffer = npt.NDArray[np.uint8]

# Nothing new is matched while a worker drains, so it ends by itself; the limit is for a flood of strangers.
_DRAIN_S: Final = 2.0
_IDLE_ROUNDS: Final = 16

# lane[1]:  4:cma/memory.0 md[4]  -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0
_LANE: Final = re.compile(r"lane\[\d+\]:\s+\d+:(\w+)/[^\n]*?->\s*\S+(?:\s+seg\s+\d+)?([^\n]*)")
# A lane for nothing else carries no block.
_IDLE_USES: Final = frozenset({"keepalive", "wireup", "cm"})


# From ucp.h and memory_type.h: a field to ask for, and the bit of the answer that counts.
_MEMORY_TYPES_FIELD: Final = 1 << 2
_CUDA_MEMORY: Final = 1 << 1


class _ContextAttr(ctypes.Structure):
    """The beginning of ucp_context_attr_t, and room for the rest: UCX writes only what it is asked for."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("request_size", ctypes.c_size_t),
        ("thread_mode", ctypes.c_int),
        ("memory_types", ctypes.c_uint64),
        ("rest", ctypes.c_char * 256),
    )


class UcxError(KVTransferError):
    """What ucxx reported, as text."""


@dataclass(frozen=True)
class _Vendor:
    """The parts of ucxx we use, and the calls of libucp that ucxx does not offer."""

    api: Any
    array: Any
    destroy_worker: Callable[[int], None]
    print_endpoint: Callable[[int, int], None]
    query_context: Callable[[int, Any], int]


_vendor: _Vendor | None = None


def load() -> _Vendor:
    """Import ucxx, once. Raises `TransportUnavailableError` where it is missing, cannot load, or NIXL is loaded."""
    global _vendor
    if _vendor is None:
        vendor.choose("ucx")
        try:
            import ucxx._lib.libucxx as api
            from ucxx._lib.arr import Array

            # Loaded already by ucxx, under this name; asked for only to reach a few functions.
            libucp = ctypes.CDLL("libucp.so.0", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except (ImportError, OSError) as error:
            raise TransportUnavailableError(f"scheme ucx needs the ucxx package: {error}") from error
        libucp.ucp_worker_destroy.argtypes = [ctypes.c_void_p]
        libucp.ucp_worker_destroy.restype = None
        libucp.ucp_ep_print_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        libucp.ucp_ep_print_info.restype = None
        libucp.ucp_context_query.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        libucp.ucp_context_query.restype = ctypes.c_int
        functions = (libucp.ucp_worker_destroy, libucp.ucp_ep_print_info, libucp.ucp_context_query)
        _vendor = _Vendor(api, Array, *functions)
    return _vendor


def parse_lanes(endpoint_info: str) -> str:
    """The transports that carry data, out of what ``ucp_ep_print_info`` writes, joined by ``+``."""
    found = []
    for name, uses in _LANE.findall(endpoint_info):
        if not set(uses.split()) or set(uses.split()) - _IDLE_USES:
            found.append(name)
    return "+".join(dict.fromkeys(found))


class Prepared:
    """A buffer looked at once, for many messages: ucxx would ask it for its address, size and layout each time."""

    __slots__ = ("array",)

    def __init__(self, buffer: Any) -> None:
        """``buffer`` offers its memory as numpy arrays do, or a GPU's by ``__cuda_array_interface__``."""
        self.array = load().array(buffer)


class Blocks:
    """The blocks of a pool, in host memory or on a GPU, each prepared when it is first used."""

    def __init__(self, num_blocks: int, block: Callable[[int], Any]) -> None:
        self._block = block
        self._prepared: list[Prepared | None] = [None] * num_blocks

    def __getitem__(self, block_id: int) -> Prepared:
        found = self._prepared[block_id]
        if found is None:
            found = self._prepared[block_id] = Prepared(self._block(block_id))
        return found


class Request:
    """A send or receive under way. Must be kept until it is done: dropping it would ask UCX to cancel."""

    def __init__(self, raw: Any, buffer: Any) -> None:
        self.raw = raw
        self._buffer = buffer

    @property
    def done(self) -> bool:
        return bool(self.raw.completed)

    def error(self) -> str | None:
        """Of a request that is done."""
        try:
            self.raw.check_error()
        except _errors() as error:
            return str(error)
        return None


class Message:
    """One message that arrived and was taken out of the queue: it must be received, somehow."""

    def __init__(self, probe: Any) -> None:
        self.probe = probe
        self.tag = int(probe.sender_tag.value)
        self.length = int(probe.length)


class Endpoint:
    """A way to one worker of a peer. ``broken`` turns true when UCX finds the peer gone."""

    def __init__(self, worker: Worker, address: bytes) -> None:
        vendor = load()
        self.broken = False
        self._closed = False
        self._closing: Request | None = None
        try:
            where = vendor.api.UCXAddress.create_from_buffer(address)
            self._raw = vendor.api.UCXEndpoint.create_from_worker_address(worker.raw, where, True)
        except _errors() as error:
            raise UcxError(str(error)) from error
        self._raw.set_close_callback(self._on_close)

    def send(self, buffer: Buffer | Prepared, tag: int) -> Request:
        """Raises `UcxError` on an endpoint that broke."""
        array = buffer.array if isinstance(buffer, Prepared) else load().array(buffer)
        try:
            return Request(self._raw.tag_send(array, load().api.UCXXTag(tag)), array)
        except _errors() as error:
            raise UcxError(str(error)) from error

    def close(self) -> None:
        """Force it: sends under way will end with an error. Then `closed` turns true while the worker progresses."""
        if self._closing is None and not self._closed:
            self._raw.remove_close_callback()
            request = self._raw.close()
            if request.ucxx_ptr:
                self._closing = Request(request, self._raw)
            else:
                # Closed already. ucxx hands out a null request then, and any use of it, its end too, crashes.
                _immortal(request)
                self._closed = True

    @property
    def closed(self) -> bool:
        if self._closing is not None and self._closing.done:
            self._closed = True
        return self._closed

    def transports(self) -> str:
        """The lanes UCX chose for blocks, such as ``posix+cma`` or ``tcp``; known as soon as there is an endpoint."""
        libc = ctypes.CDLL(None)
        libc.open_memstream.restype = ctypes.c_void_p
        libc.fclose.argtypes = libc.free.argtypes = [ctypes.c_void_p]
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
        if not stream:
            return ""
        load().print_endpoint(self._raw.handle, stream)
        libc.fclose(stream)
        lanes = parse_lanes((text.value or b"").decode("ascii", "replace"))
        libc.free(text)
        return lanes

    def leak(self) -> None:
        _immortal(self._raw, self._closing)

    def _on_close(self) -> None:
        self.broken = True


class Context:
    """A UCX context. ``loopback_only`` keeps its network transports on ``lo`` unless the operator chose devices."""

    def __init__(self, *, loopback_only: bool) -> None:
        api = load().api
        options = {"NET_DEVICES": "lo"} if loopback_only and vendor.setting("UCX_NET_DEVICES") is None else {}
        try:
            self.raw = api.UCXContext(options, (api.Feature.TAG, api.Feature.WAKEUP))
        except _errors() as error:
            raise TransportUnavailableError(f"UCX cannot start: {error}") from error

    @property
    def knows_cuda(self) -> bool:
        """Whether this UCX moves a GPU's memory on this host. ucxx only says whether its settings would let it."""
        asked = _ContextAttr(field_mask=_MEMORY_TYPES_FIELD)
        failed = load().query_context(self.raw.handle, ctypes.byref(asked))
        return not failed and bool(asked.memory_types & _CUDA_MEMORY)


class Worker:
    """A UCX worker in blocking mode. ``fd`` becomes readable when, after `arm`, there is work to `progress`."""

    def __init__(self, context: Context) -> None:
        api = load().api
        try:
            self.raw = api.UCXWorker(context.raw)
            self.raw.init_blocking_progress_mode()
        except _errors() as error:
            raise TransportUnavailableError(f"UCX cannot start a worker: {error}") from error
        self.fd = int(self.raw.epoll_file_descriptor)
        self.address = bytes(self.raw.address)
        self._any_tag = (api.UCXXTag(0), api.UCXXTagMask(0), True)

    def progress(self) -> None:
        self.raw.progress()

    def arm(self) -> bool:
        """False if there is work already."""
        return bool(self.raw.arm())

    def probe(self) -> Message | None:
        probe = self.raw.tag_probe(*self._any_tag)
        return Message(probe) if probe.matched else None

    def receive(self, message: Message, buffer: Buffer | Prepared) -> Request:
        """Into a buffer that is too short, it ends with an error and moves nothing."""
        array = buffer.array if isinstance(buffer, Prepared) else load().array(buffer)
        return Request(self.raw.tag_recv_with_handle(array, message.probe), array)

    def destroy(self, in_use: list[Request]) -> None:
        """Tear it down now, whatever is under way: no byte is written or read for it afterwards. The fence.

        ucxx would wait for the requests, which keep their worker alive, so the UCX worker is destroyed below it.
        The Python objects of it must then never be freed (they would call into it), which costs a few kB.
        Copies under way in this process are finished first: UCX aborts the process on a worker that is busy.
        """
        idle, until = 0, time.monotonic() + _DRAIN_S
        while idle < _IDLE_ROUNDS and time.monotonic() < until:
            idle = 0 if self.raw.progress_once() else idle + 1
        _immortal(self.raw, *(request.raw for request in in_use))
        load().destroy_worker(self.raw.handle)
        os.close(self.fd)


def _errors() -> tuple[type[BaseException], ...]:
    return (load().api.UCXError, RuntimeError, ValueError)


def _immortal(*objects: Any) -> None:
    for thing in objects:
        if thing is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
