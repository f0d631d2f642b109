"""Opens a plane: the table from scheme to transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvtransfer.dead import DeadPeers
from kvtransfer.device_pool import DevicePool
from kvtransfer.digest import Digester, DigestMode
from kvtransfer.errors import LayoutError, TransportUnavailableError
from kvtransfer.events import EventBox
from kvtransfer.layout import BlockLayout
from kvtransfer.meter import TransferMeter
from kvtransfer.plane import Identity, KVPlane
from kvtransfer.receives import ReceiveLedger
from kvtransfer.regroup import Regrouper
from kvtransfer.road import Pool, Road, RoadContext
from kvtransfer.routes import Routes, TransportKind, can_satisfy
from kvtransfer.sends import SendLedger
from kvtransfer.shared_memory import SharedMemory
from kvtransfer.ticket import PeerId


def _open_inproc(context: RoadContext) -> Road:
    from kvtransfer.inproc import InprocRoad

    return InprocRoad(context)


def _open_tcp(context: RoadContext) -> Road:
    from kvtransfer.tcp import open_tcp

    return open_tcp(context)


def _open_ucx(context: RoadContext) -> Road:
    # Here and not above: a machine without ucxx must still be able to use tcp.
    from kvtransfer.ucx_road import UcxRoad

    return UcxRoad(context)


def _open_nixl(context: RoadContext) -> Road:
    from kvtransfer.nixl_road import open_nixl

    return open_nixl(context)


_ROADS: Final[dict[str, Callable[[RoadContext], Road]]] = {
    "inproc": _open_inproc,
    "nixl": _open_nixl,
    "tcp": _open_tcp,
    "ucx": _open_ucx,
}
SCHEMES: Final = tuple(_ROADS)


def open_plane(
    schemes: Sequence[str],
    pool: Pool,
    identity: tuple[str, int, str],
    *,
    host: str = "127.0.0.1",
    secret: bytes | None,
    wakeup: Callable[[], None],
    digest: DigestMode = "sampled",
    layout: BlockLayout | None = None,
    require: TransportKind | None = None,
    memory: SharedMemory | None = None,
    device: DevicePool | None = None,
) -> KVPlane:
    """Open a plane that offers these schemes.

    ``pool`` is a C-contiguous, writable uint8 array ``[num_blocks, block_bytes]``, borrowed until the plane is
    closed; ``identity`` is (node id, epoch, layout fingerprint). ``host`` is the address that is bound *and*
    told to peers; without a ``secret`` it must be loopback. ``wakeup`` is called on another thread whenever
    `poll` has something to say; it must neither block nor raise. ``digest`` is asked of every block sent to us.
    With its ``layout`` the plane also sends to pools whose blocks hold another number of tokens.
    With ``require`` no block goes over anything else: schemes that cannot be that are not offered, and a connection
    that comes out on something else is refused. A pool that lies at the start of ``memory`` is read there by receivers
    on the same host, which is quicker. With a ``device`` blocks are moved from and to that, as they are or by way of
    ``pool``, its twin: they must be there when they are pushed, and are there when their ticket is complete.

    Raises `LayoutError` for an unfit pool, `TransportUnavailableError` for a scheme that is unknown, whose
    library is missing, or that cannot bind, and if none can be what is required.
    """
    _check_pool(pool, memory)
    able = _able(schemes, require)
    me = Identity(*identity)
    events = EventBox(wakeup)
    dead = DeadPeers()
    meter = TransferMeter()
    num_blocks = int(pool.shape[0])
    context = RoadContext(
        pool=pool,
        me=PeerId(me.node_id, me.epoch),
        fingerprint=me.fingerprint,
        secret=secret,
        host=host,
        events=events,
        receives=ReceiveLedger(num_blocks, events, dead, meter),
        sends=SendLedger(num_blocks, events, meter),
        dead=dead,
        digester=Digester(pool, digest),
        meter=meter,
        routes=Routes(require),
        regrouper=None if layout is None else Regrouper(pool, layout),
        memory=memory,
        device=device,
    )
    return KVPlane(context, {scheme: _ROADS[scheme] for scheme in able})


def _able(schemes: Sequence[str], require: TransportKind | None) -> list[str]:
    if not schemes:
        raise TransportUnavailableError("a plane needs at least one scheme")
    for scheme in schemes:
        if scheme not in _ROADS:
            raise TransportUnavailableError(f"unknown scheme {scheme!r}; one of {', '.join(SCHEMES)}")
    if {"ucx", "nixl"} <= set(schemes):
        raise TransportUnavailableError("ucx and nixl exclude each other: each brings its own UCX into the process")
    able = [scheme for scheme in schemes if can_satisfy(scheme, require)]
    if not able:
        raise TransportUnavailableError(f"{require} is required, and {' and '.join(schemes)} can never be that")
    return able


def _check_pool(pool: Pool, memory: SharedMemory | None) -> None:
    # The transports take the pointer and check nothing themselves.
    if pool.ndim != 2 or pool.dtype != np.uint8 or 0 in pool.shape:
        raise LayoutError("a pool is a non-empty uint8 array [num_blocks, block_bytes]")
    if not pool.flags.c_contiguous:
        raise LayoutError("a pool must be C-contiguous: a block is one run of bytes")
    if not pool.flags.writeable:
        raise LayoutError("a pool must be writable")
    if memory is not None:
        start = np.frombuffer(memory.buffer, np.uint8).ctypes.data
        if pool.ctypes.data != start or pool.nbytes > memory.name.num_bytes:
            raise LayoutError("the pool does not begin where the shared memory does, or is larger")
