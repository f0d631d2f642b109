"""The TCP road: handshake, then blocks as frames of a header and the block's bytes, straight from pool to pool."""

from __future__ import annotations

import socket
from typing import Final

from kvtransfer.road import RoadContext
from kvtransfer.socket_road import Dialect, SocketRoad
from kvtransfer.tcp_inbound import Inbound
from kvtransfer.tcp_outbound import Outbound

_SCRATCH_BYTES: Final = 256 << 10


def open_tcp(context: RoadContext) -> SocketRoad:
    """Listens from now on. Raises `TransportUnavailableError` if it may not or cannot bind."""
    # What was refused is read into this; one for all connections, they take turns.
    scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def inbound(sock: socket.socket, context: RoadContext, now: float) -> Inbound:
        return Inbound(sock, context, scratch, now)

    return SocketRoad(context, Dialect("tcp", inbound, Outbound, regroups=True))
