"""Where a plane is reached."""

from __future__ import annotations

import ipaddress
import socket

from kvtransfer.errors import TransportUnavailableError
from kvtransfer.road import RoadContext


def is_loopback(context: RoadContext) -> bool:
    """Whether only this host can reach it. Raises `TransportUnavailableError` if others can and there is no secret."""
    try:
        where = socket.getaddrinfo(context.host, 0, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise TransportUnavailableError(f"cannot resolve {context.host!r}") from error
    loopback = ipaddress.ip_address(where[0]).is_loopback
    if not loopback and not context.secret:
        raise TransportUnavailableError("without a shared secret only a loopback address may be bound")
    return loopback
