"""What transfers did: how they ended, how long they took, and how much of that was hidden behind compute."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from kvtransfer.session import OUTCOMES

Direction = Literal["send", "receive"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("send", "receive")
# Upper bounds in seconds; the last bucket has none.
BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Durations:
    """Transfers by duration: ``counts[i]`` took up to ``BUCKETS[i]``, the last one longer; ``total_s`` in all."""

    counts: tuple[int, ...]
    total_s: float


@dataclass(frozen=True)
class TransferStats:
    """``outcomes`` by (direction, outcome). ``moving_s`` is how long any block was on its way to or from this node,
    ``hidden_s`` the part of it during which this node was computing a step."""

    outcomes: Mapping[tuple[Direction, str], int]
    durations: Mapping[Direction, Durations]
    moving_s: float
    hidden_s: float

    @property
    def overlap_ratio(self) -> float:
        """Share of transfer time hidden behind compute; 0 if nothing was ever moved."""
        return self.hidden_s / self.moving_s if self.moving_s else 0.0


class TransferMeter:
    """Of one plane. Thread-safe; never calls anybody, so it may be used under any lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys([(side, how) for side in DIRECTIONS for how in OUTCOMES], 0)
        self._counts = {side: [0] * (len(BUCKETS) + 1) for side in DIRECTIONS}
        self._total_s = dict.fromkeys(DIRECTIONS, 0.0)
        self._num_moving = 0
        self._num_computing = 0
        self._looked_s = clock()
        self._moving_s = 0.0
        self._hidden_s = 0.0

    def now(self) -> float:
        """Seconds of the clock that sessions are timed with."""
        return self._clock()

    def moving(self, change: int) -> None:
        """So many blocks more, or fewer, are on their way."""
        with self._lock:
            self._look()
            self._num_moving += change

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around every step of the node."""
        self._compute(1)
        try:
            yield
        finally:
            self._compute(-1)

    def ended(self, side: Direction, outcome: str, seconds: float) -> None:
        """A transfer is over."""
        with self._lock:
            self._outcomes[side, outcome] += 1
            self._counts[side][bisect_left(BUCKETS, seconds)] += 1
            self._total_s[side] += seconds

    def stats(self) -> TransferStats:
        """Everything until now."""
        with self._lock:
            self._look()
            durations = {side: Durations(tuple(self._counts[side]), self._total_s[side]) for side in DIRECTIONS}
            return TransferStats(
                MappingProxyType(dict(self._outcomes)), MappingProxyType(durations), self._moving_s, self._hidden_s
            )

    def _compute(self, change: int) -> None:
        with self._lock:
            self._look()
            self._num_computing += change

    def _look(self) -> None:
        """Account for the time since the last change."""
        now = self._clock()
        if self._num_moving:
            self._moving_s += now - self._looked_s
            if self._num_computing:
                self._hidden_s += now - self._looked_s
        self._looked_s = now
