"""What can go wrong while blocks move. Vendor exceptions (ucxx, msgspec, sockets) are translated where they occur.

Errors raised to a caller mean "nothing was done"; whatever fails later, on the wire, is an event
(`kvtransfer.events`), never an exception.
"""

from __future__ import annotations


class KVTransferError(Exception):
    """Base of every error this room raises."""


class LayoutError(KVTransferError):
    """A block layout or a pool that cannot exist (unknown dtype, wrong shape, not contiguous, read-only)."""


class HelloError(KVTransferError):
    """Bytes that are not one of our hellos, or an address in one that this transport cannot read."""


class TicketError(KVTransferError):
    """Bytes that are not one of our tickets, or a use of a ticket that its state does not allow."""


class LayoutMismatchError(KVTransferError):
    """The two pools do not hold the same kind of block: other fingerprint or other block size."""


class PeerUnreachableError(KVTransferError):
    """No transport in common with the peer, or the peer was declared dead."""


class TransportUnavailableError(KVTransferError):
    """A transport this machine or this configuration cannot offer (library missing, bind refused)."""


class PlaneClosedError(KVTransferError):
    """The plane was closed or aborted."""


class PlaneBrokenError(KVTransferError):
    """A transport's thread ended by itself, which is a bug. Close the plane; a new life may open another one."""
