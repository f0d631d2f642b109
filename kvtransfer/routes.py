"""What really carries the blocks to and from each peer, and which peers were refused for it.

A library of transports picks one by itself and says nothing when it is a slow one. So every connection reports what
it came out on, before a block goes over it, and one that is not of the required kind is not used at all.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal, get_args

from kvtransfer.ticket import PeerId

logger = logging.getLogger(__name__)

TransportKind = Literal["rdma", "cuda", "shm", "tcp"]
TRANSPORT_KINDS: Final[tuple[TransportKind, ...]] = get_args(TransportKind)
Direction = Literal["sending", "receiving"]

# UCX's names of transports; those of InfiniBand and RoCE have a suffix for the driver (rc_mlx5, ud_verbs).
_KINDS: Final[dict[str, TransportKind]] = {
    "rc": "rdma",
    "dc": "rdma",
    "ud": "rdma",
    "srd": "rdma",
    "gga": "rdma",
    "cuda_ipc": "cuda",
    "rocm_ipc": "cuda",
    "posix": "shm",
    "sysv": "shm",
    "cma": "shm",
    "xpmem": "shm",
    "knem": "shm",
    "self": "shm",
    "memory": "shm",
    # Not UCX's: the receiver copies out of the sender's pool.
    "mapped": "shm",
    "tcp": "tcp",
    # Of a library that tells no more than that.
    "rdma": "rdma",
    "cuda": "cuda",
    "shm": "shm",
}
# They bring bytes to and from a GPU on this host, beside the lane that carries them to the peer.
_HELPERS: Final = frozenset({"cuda_copy", "gdr_copy", "rocm_copy", "rocm_gdr"})
# What each scheme can come out as.
_SCHEME_KINDS: Final[dict[str, frozenset[TransportKind]]] = {
    "inproc": frozenset({"shm"}),
    "nixl": frozenset({"rdma", "shm", "tcp"}),
    "tcp": frozenset({"tcp"}),
    "ucx": frozenset(TRANSPORT_KINDS),
}
_REMEMBERED: Final = 256


def kind_of(transport: str) -> TransportKind | None:
    """Of one transport such as ``rc_mlx5``; None for one we do not know."""
    return _KINDS.get(transport) or _KINDS.get(transport.partition("_")[0])


def satisfies(lanes: str, required: TransportKind) -> bool:
    """Whether all lanes, such as ``posix+cma``, are of that kind. A lane that we do not know is of none."""
    names = [name for name in lanes.split("+") if name and name not in _HELPERS]
    return bool(names) and all(kind_of(name) == required for name in names)


def shares_memory(lanes: str) -> bool:
    """Whether any of the lanes is memory that both processes write."""
    return any(kind_of(name) == "shm" for name in lanes.split("+"))


def can_satisfy(scheme: str, required: TransportKind | None) -> bool:
    """Whether a road of this scheme may come out as that kind."""
    return required is None or required in _SCHEME_KINDS[scheme]


@dataclass(frozen=True, slots=True)
class Route:
    """One connection as it came out: over which lanes of which scheme blocks go to a peer, or come from it."""

    peer: PeerId
    direction: Direction
    scheme: str
    lanes: str


class Routes:
    """The book of a plane's connections. Thread-safe: every road writes it, the owner reads."""

    def __init__(self, required: TransportKind | None) -> None:
        self.required = required
        self._lock = threading.Lock()
        self._open: dict[object, Route] = {}
        self._refused: OrderedDict[PeerId, str] = OrderedDict()

    def connected(self, connection: object, route: Route) -> str | None:
        """A connection is up, not used yet. Returns why it must not be used, or None.

        ``connection`` is any hashable that names it in `closed`.
        """
        peer, lanes = route.peer, route.lanes or "an unknown transport"
        if self.required is not None and not satisfies(route.lanes, self.required):
            came_out = f"the {route.scheme} connection with {peer.node_id} came out on {lanes}"
            reason = f"{came_out}, {self.required} is required"
            logger.error("refused: %s", reason)
            self.refuse(peer, reason)
            return reason
        logger.info("kv connection, %s: peer %s, scheme %s over %s", route.direction, peer.node_id, route.scheme, lanes)
        with self._lock:
            self._open[connection] = route
        return None

    def closed(self, connection: object) -> None:
        """It is gone; unknown is fine."""
        with self._lock:
            self._open.pop(connection, None)

    def refuse(self, peer: PeerId, reason: str) -> None:
        """This life of that node cannot be reached as it is required; the latest reason counts."""
        with self._lock:
            self._refused[peer] = reason
            self._refused.move_to_end(peer)
            while len(self._refused) > _REMEMBERED:
                self._refused.popitem(last=False)

    def refusal(self, peer: PeerId) -> str | None:
        """Why that life of that node may not be used, or None."""
        with self._lock:
            return self._refused.get(peer)

    def forget(self, peer: PeerId) -> None:
        """That life is over."""
        with self._lock:
            self._refused.pop(peer, None)

    def open(self) -> tuple[Route, ...]:
        """Every connection that is up."""
        with self._lock:
            return tuple(self._open.values())

    def refused(self) -> dict[PeerId, str]:
        """Lives of peers that may not be used, and why."""
        with self._lock:
            return dict(self._refused)
