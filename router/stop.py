"""Cutting text at stop strings while it streams."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The match that *ends* first wins, the longest one where several end together. That rule looks at no
    character after the match, so the cut is the same however the text is split into pieces. Text that may
    turn out to be the beginning of a stop string is held back.

    Each character is tried once as the beginning of a stop string, whatever the number of pieces.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """``stops``: non-empty strings, possibly none; with ``shown`` the match belongs to the text."""
        self._stops = tuple(stops)
        self._shown = shown
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return what may be shown now and whether a stop string ended the text."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        match = self._first_match(buffer, len(self._held))
        if match is not None:
            start, self.matched = match
            self._held = ""
            return buffer[: start + len(self.matched) * self._shown], True
        start = self._open_start(buffer)
        self._held = buffer[start:]
        return buffer[:start], False

    def flush(self) -> str:
        """The text is over: what was held back belongs to it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_held: int) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first; it cannot end within the held text."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _open_start(self, buffer: str) -> int:
        """Where the longest suffix begins that is also the beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops)
        for start in range(max(0, len(buffer) - longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
