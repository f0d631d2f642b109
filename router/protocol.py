"""uvicorn's fast HTTP parser with the two limits it lacks: how large and how slow a request's head may be.

Without them a client that sends headers for ever fills the router's memory, and one that sends nothing holds
a connection for ever. Serve with ``uvicorn.Config(app, http=BoundedHttpProtocol)``.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.errors import InvalidRequestError
from router.completion import error_json


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. The deadline runs from its start, or from a request's first byte, to that head's end."""

    max_head_bytes: ClassVar[int] = 64 << 10
    head_timeout_s: ClassVar[float] = 30.0

    _in_head = False
    _num_head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        # Bytes of a head that fits into one read are bounded by the read itself.
        if was_in_head and self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_head_bytes and not self.transport.is_closing():
                self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._num_head_bytes = 0
        self._start_deadline()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_deadline()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP request, in the shape of every other refusal, and hang up."""
        self._stop_deadline()
        body = error_json(InvalidRequestError(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self.head_timeout_s, self._head_timed_out)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_timed_out(self) -> None:
        self._deadline = None
        self.transport.close()
