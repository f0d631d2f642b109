"""The socket of a NIXL connection as a stream of messages, in both directions. Never blocks."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from kvtransfer.nixl_wire import Frames, ToReceiver, ToSender, frame

_READ_BYTES: Final = 256 << 10


class Stream:
    """Owned by the kv-io thread. Its methods raise OSError when the connection is gone, `WireError` for nonsense."""

    def __init__(self, sock: socket.socket, *, to_sender: bool) -> None:
        self._sock = sock
        self._frames = Frames(to_sender=to_sender)
        self._unsent = bytearray()

    @property
    def wants_write(self) -> bool:
        """Whether something is queued that the socket did not take."""
        return bool(self._unsent)

    def read(self) -> list[ToSender | ToReceiver]:
        """Everything that has come. What came before the end of the stream is given first."""
        found: list[ToSender | ToReceiver] = []
        with contextlib.suppress(BlockingIOError):
            while not found:
                data = self._sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("closed by the peer")
                found += self._frames.feed(data)
        return found

    def send(self, message: ToSender | ToReceiver) -> None:
        """Queue it, and send what the socket takes."""
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
