"""The one place where work waits: requests in order of priority and arrival, until a placement is found."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from cluster.errors import BatonError, NoUsablePairError, OverloadedError
from router.naming import PromptNames
from router.policy import Booking, Busy, Demand, NoPair

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """A place in the line: lower priority first, then arrival. Kept when a request has to wait again."""

    priority: int
    arrival: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be placed."""

    demand: Demand
    names: PromptNames


class WaitingLine:
    """Strictly first come, first served within a priority: nobody overtakes a large request at the head.

    ``try_place`` decides for the request at the head and books what it takes, ``give_back`` undoes a booking that
    came too late; :meth:`pump` is called whenever something may have become free.
    """

    def __init__(
        self,
        try_place: Callable[[Wanted], Booking | Busy | NoPair],
        give_back: Callable[[Booking], None],
        *,
        max_waiting: int,
        max_wait_s: float,
    ) -> None:
        self._try_place = try_place
        self._give_back = give_back
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._line: list[tuple[Turn, Wanted, asyncio.Future[Booking]]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._line)

    def turn(self, priority: int = 0) -> Turn:
        """A new place at the end of a priority."""
        return Turn(priority, next(self._arrivals))

    async def wait(self, turn: Turn, wanted: Wanted) -> Booking:
        """Wait for a placement.

        Raises :class:`OverloadedError` if the line is full or ``max_wait_s`` passes, :class:`NoUsablePairError`
        if no pair is alive.
        """
        if len(self._line) >= self._max_waiting:
            raise OverloadedError("the server's queue is full", retry_after_s=RETRY_AFTER_S)
        placed: asyncio.Future[Booking] = asyncio.get_running_loop().create_future()
        entry = (turn, wanted, placed)
        insort(self._line, entry, key=lambda waiting: waiting[0])
        self.pump()
        try:
            async with asyncio.timeout(self._max_wait_s):
                return await asyncio.shield(placed)
        except TimeoutError:
            self._leave(entry)
            raise OverloadedError(
                "no capacity became free in time; try again later", retry_after_s=RETRY_AFTER_S
            ) from None
        except asyncio.CancelledError:
            self._leave(entry)
            raise

    def _leave(self, entry: tuple[Turn, Wanted, asyncio.Future[Booking]]) -> None:
        """Stop waiting. A placement that was made in the same moment is given back."""
        placed = entry[2]
        if not placed.done():
            placed.cancel()
            self._line.remove(entry)
        elif placed.exception() is None:
            self._give_back(placed.result())
        self.pump()

    def pump(self) -> None:
        """Place from the head of the line until somebody has to wait."""
        while self._line:
            _turn, wanted, placed = self._line[0]
            outcome = self._try_place(wanted)
            if isinstance(outcome, Busy):
                return
            self._line.pop(0)
            _answer(placed, outcome)


def _answer(placed: asyncio.Future[Booking], outcome: Booking | NoPair) -> None:
    if isinstance(outcome, Booking):
        placed.set_result(outcome)
    else:
        error: BatonError = NoUsablePairError(outcome.reason, retry_after_s=RETRY_AFTER_S)
        placed.set_exception(error)
