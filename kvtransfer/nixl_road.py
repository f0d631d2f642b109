"""The NIXL road: one-sided writes from pool to pool, and a socket on which each block is asked for and reported.

The socket wakes whoever has to do something, tells both sides at once when the other is gone, and keeps its messages
in order. UCX is polled only while blocks are on their way; an idle road takes no CPU.
"""

from __future__ import annotations

from kvtransfer.errors import TransportUnavailableError
from kvtransfer.host import is_loopback
from kvtransfer.nixl import Agent, NixlError, load
from kvtransfer.nixl_inbound import NixlInbound
from kvtransfer.nixl_outbound import NixlOutbound
from kvtransfer.road import RoadContext
from kvtransfer.socket_road import Dialect, SocketRoad


def open_nixl(context: RoadContext) -> SocketRoad:
    """Listens from now on. The process must end with `kvtransfer.vendor.leave`.

    Raises `TransportUnavailableError` without nixl-cu12, beside UCXX, off loopback without a secret, or if it cannot
    register the pool.
    """
    load(loopback_only=is_loopback(context), required=context.routes.required)
    try:
        # The first agent loads plugins for half a second: now, and not on the first transfer.
        Agent(context.pool).destroy()
    except NixlError as error:
        raise TransportUnavailableError(str(error)) from error
    return SocketRoad(context, Dialect("nixl", NixlInbound, NixlOutbound))
