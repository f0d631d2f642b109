"""What a socket road asks of its connections, whatever they speak.

All methods run on the road's kv-io thread. One that raises `WireError` or OSError ends the connection: the road
then calls `close`. ``deadline`` (monotonic s, or None) is when `on_deadline` wants to be called.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod

from kvtransfer.events import PeerLost
from kvtransfer.sends import Push
from kvtransfer.ticket import PeerId


class Connection(ABC):
    """A socket and what it is used for; ``peer`` is None until it has proven who it is."""

    sock: socket.socket
    peer: PeerId | None
    deadline: float | None

    @property
    def wants_write(self) -> bool:
        """Whether it has something to send."""
        return False

    @abstractmethod
    def on_ready(self, now: float) -> None:
        """The socket can be read, or written if that was wanted."""

    @abstractmethod
    def on_deadline(self) -> None:
        """The deadline has passed."""

    @abstractmethod
    def lost_event(self) -> PeerLost | None:
        """What to tell the owner when the connection is lost."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Close the socket and report to the ledgers what did not come through, once that is safe."""


class InboundConnection(Connection):
    """The receiving end."""

    @property
    def proven(self) -> bool:
        """Whether it is a peer and no stranger."""
        return self.peer is not None

    @abstractmethod
    def settle_withdrawn(self) -> None:
        """End the claims of withdrawn tickets as early as is safe."""


class OutboundConnection(Connection):
    """The sending end; one per receiving plane, shared by all pushes to it."""

    peer: PeerId
    address: bytes

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether blocks wait or are on their way."""

    @abstractmethod
    def add(self, push: Push) -> None:
        """Blocks of this push wait in the send ledger."""
