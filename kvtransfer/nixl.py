"""The one file that knows nixl. Wraps its agents: one agent is one UCX worker with the whole pool registered.

NIXL is one-sided: who knows an agent's metadata and an address can write there at any time. So an agent serves one
peer, it is made when that peer has proven who it is, and destroying it is the fence: no byte is written or read for it
afterwards. That holds where our own UCX or our network card moves the bytes; transports with which the peer writes
into our memory alone are not used. (Measured: 20 ms to make an agent, 5 ms to destroy one; the first of a process
0.5 s.)

Agents have no progress thread: with the delay its Python wrapper sets, that thread polls all the time, and one that
waits for events moves half as much over TCP. Whoever has something under way calls `Agent.progress`; all NIXL calls
hold the GIL. (Measured, 64 blocks of 512 KiB over TCP: 1.9 GB/s polled, 0.9 with the waiting thread.)
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtransfer import vendor
from kvtransfer.errors import TransportUnavailableError
from kvtransfer.routes import TransportKind

Buffer = npt.NDArray[np.uint8]

_CARDS: Final = "/sys/class/infiniband"
_BACKEND: Final = "UCX"
# What UCX may use if the operator demands a kind of transport: NIXL does not tell what it has chosen.
_TLS: Final[dict[TransportKind, str]] = {"rdma": "ib,cuda_copy,gdr_copy", "shm": "posix,sysv", "tcp": "tcp"}
# Over these a writer reaches into our memory by itself. Destroying our agent does not stop it, so they cannot be
# fenced: a stopped sender that went on was seen to write into blocks that had been given to somebody else.
_UNFENCED: Final = "cma,xpmem,knem,cuda_ipc,rocm_ipc"
# Here each fragment of a write is answered into a short queue. While a peer hangs it is full, and UCX crashes when
# an agent is destroyed whose answers wait for room. Used only where shared memory is required.
_QUEUED: Final = "posix,sysv"


class NixlError(ConnectionError):
    """What NIXL reported, as text. Costs the connection of its agent."""


_api: Any = None


def load(*, loopback_only: bool, required: TransportKind | None) -> Any:
    """Import nixl, once.

    Raises `TransportUnavailableError` where it is missing, cannot load, or UCXX is loaded; and on a host without an
    RDMA card, unless a kind of transport is ``required`` or the operator has set ``UCX_TLS``.

    ``loopback_only`` keeps UCX on ``lo``, ``required`` on that kind of transport, as far as the operator's environment
    says nothing else; if it says something else than ``required``, that is an error.
    """
    global _api
    if _api is None:
        vendor.choose("nixl")
        if loopback_only:
            vendor.set_default("UCX_NET_DEVICES", "lo")
        if required is None and vendor.setting("UCX_TLS") is None and not os.path.isdir(_CARDS):
            raise TransportUnavailableError(
                "scheme nixl is for RDMA, and this host has no card: without one NIXL's UCX may end this process when a"
                " sender dies in mid-transfer. Use ucx or tcp, or demand it with --require-transport tcp"
            )
        allowed = f"^{_UNFENCED},{_QUEUED}" if required is None else _TLS[required]
        in_force = vendor.set_default("UCX_TLS", allowed)
        if in_force != allowed and required is not None:
            raise TransportUnavailableError(f"{required} is required, but UCX_TLS={in_force} is set")
        vendor.make_home_readable()
        try:
            import nixl_cu12._bindings as api
        except (ImportError, OSError) as error:
            raise TransportUnavailableError(f"scheme nixl needs the nixl-cu12 package: {error}") from error
        _api = api
    return _api


def lanes() -> str:
    """What NIXL's UCX may use: the kind of transport if the environment leaves no choice, else just that it is NIXL."""
    allowed = vendor.setting("UCX_TLS")
    return next((kind for kind, names in _TLS.items() if names == allowed), "nixl")


@dataclass(frozen=True)
class Region:
    """A peer's pool as it lies in that peer's memory."""

    base: int
    block_bytes: int
    num_blocks: int


class Write:
    """Blocks on their way to a peer's pool. Keep it until it is done, then `release` it."""

    def __init__(self, agent: Agent, handle: int, status: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._status = status

    def done(self) -> bool:
        """True when all bytes lie in the peer's memory. Raises `NixlError` if they never will."""
        try:
            if self._status == _api.NIXL_IN_PROG:
                self._status = self._agent.raw.getXferStatus(self._handle)
        except _errors() as error:
            raise NixlError(f"NIXL: {error}") from error
        if self._status == _api.NIXL_IN_PROG:
            return False
        if self._status != _api.NIXL_SUCCESS:
            raise NixlError(f"NIXL: {self._status}")
        return True

    def release(self) -> None:
        """Of a write that is done."""
        self._agent.raw.releaseXferReq(self._handle)


class Agent:
    """One end of the way between two pools. ``pool`` is borrowed until `destroy`."""

    def __init__(self, pool: Buffer) -> None:
        """Raises `NixlError`."""
        self._pool = pool
        self._peer = ""
        self._prepared: list[int] = []
        config = _api.nixlAgentConfig()
        config.useProgThread = config.useListenThread = config.captureTelemetry = False
        config.syncMode = _api.NIXL_THREAD_SYNC_NONE
        try:
            self.raw: Any = _api.nixlAgent(secrets.token_hex(16), config)
            self._backend = self.raw.createBackend(_BACKEND, {"ucx_error_handling_mode": "peer"})
            self._memory = _api.nixlRegDList(_api.DRAM_SEG, [(pool.ctypes.data, pool.nbytes, 0, "")])
            self.raw.registerMem(self._memory, [self._backend])
        except _errors() as error:
            raise NixlError(f"NIXL cannot make an agent: {error}") from error

    @property
    def region(self) -> Region:
        """Our pool, for the peer."""
        num_blocks, block_bytes = self._pool.shape
        return Region(self._pool.ctypes.data, int(block_bytes), int(num_blocks))

    def metadata(self) -> bytes:
        """What the peer needs to write into our pool."""
        return bytes(self.raw.getLocalMD())

    def connect(self, metadata: bytes, region: Region) -> None:
        """Get ready to write into the peer's pool. The metadata must be proven: NIXL trusts it. Raises `NixlError`."""
        try:
            self._peer = self.raw.loadRemoteMD(metadata).decode()
            for name, where in ((_api.NIXL_INIT_AGENT, self.region), (self._peer, region)):
                blocks = _api.nixlXferDList(_api.DRAM_SEG, _descriptors(where))
                self._prepared.append(self.raw.prepXferDlist(name, blocks, [self._backend]))
        except _errors() as error:
            raise NixlError(f"NIXL cannot reach the peer: {error}") from error

    def write(self, ours: Sequence[int], theirs: Sequence[int]) -> Write:
        """Start to copy our block ``ours[i]`` into the peer's block ``theirs[i]``. Raises `NixlError`."""
        local, remote = self._prepared
        indexes = (np.asarray(ours, np.int32), np.asarray(theirs, np.int32))
        try:
            handle = self.raw.makeXferReq(
                _api.NIXL_WRITE, local, indexes[0], remote, indexes[1], b"", [self._backend], True
            )
            return Write(self, handle, self.raw.postXferReq(handle, b""))
        except _errors() as error:
            raise NixlError(f"NIXL: {error}") from error

    def progress(self) -> None:
        """Let what is under way go on, writes of the peer too. Raises `NixlError`."""
        try:
            self.raw.getNotifs({}, [self._backend])
        except _errors() as error:
            raise NixlError(f"NIXL: {error}") from error

    def destroy(self) -> None:
        """The fence: afterwards nothing reads or writes the pool, whatever was under way. Idempotent."""
        # Its C++ destructor does all of that, at once: nothing else refers to it.
        self.raw = None


def _descriptors(region: Region) -> npt.NDArray[np.uint64]:
    blocks = np.zeros((region.num_blocks, 3), np.uint64)
    blocks[:, 0] = np.uint64(region.base) + np.arange(region.num_blocks, dtype=np.uint64) * np.uint64(
        region.block_bytes
    )
    blocks[:, 1] = region.block_bytes
    return blocks


def _errors() -> tuple[type[BaseException], ...]:
    own = tuple(getattr(_api, name) for name in dir(_api) if name.startswith("nixl") and name.endswith("Error"))
    return (RuntimeError, ValueError, TypeError, MemoryError, *own)
