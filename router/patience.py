"""How long a client may leave a frame unread."""

from __future__ import annotations

import asyncio
from types import TracebackType


class SendPatience:
    """Ends ``block`` by its timeout once something has been sent inside ``with patience`` for ``limit_s`` seconds.

    One timer an answer: an ``asyncio.timeout`` a frame took as long as the frame's way through the HTTP server.
    """

    def __init__(self, limit_s: float, block: asyncio.Timeout) -> None:
        self._limit_s = limit_s
        self._block = block
        self._since_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit_s, self._look)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._timer.cancel()

    def __enter__(self) -> None:
        self._since_s = self._loop.time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        ends_s = (now_s if self._since_s is None else self._since_s) + self._limit_s
        if ends_s <= now_s:
            self._block.reschedule(now_s)
        else:
            self._timer = self._loop.call_at(ends_s, self._look)
