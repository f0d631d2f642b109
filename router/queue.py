"""The one place where work waits: requests in order of priority and arrival, until a placement is found."""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from cluster.errors import BatonError, EngineError, NoUsablePairError, OverloadedError
from router.naming import PromptNames
from router.policy import Booking, Busy, Demand, NoPair

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """A place in the line: lower priority first, then arrival. Kept when a request has to wait again.

    ``until_s`` is when its patience ends, by the event loop's clock, however often it waits.
    """

    priority: int
    arrival: int
    until_s: float = field(compare=False)


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
        """A new place at the end of a priority. Raises :class:`OverloadedError` if too many wait already."""
        if len(self._line) >= self._max_waiting:
            raise OverloadedError("the server's queue is full", retry_after_s=RETRY_AFTER_S)
        return Turn(priority, next(self._arrivals), self._patience_ends())

    def renew(self, turn: Turn) -> Turn:
        """The same place with new patience, for a request that starts over."""
        return replace(turn, until_s=self._patience_ends())

    async def wait(self, turn: Turn, wanted: Wanted) -> Booking:
        """Wait for a placement.

        Raises :class:`OverloadedError` if the turn's patience ends, :class:`NoUsablePairError` if no pair that
        could serve the request is alive.
        """
        if not self._line and not isinstance(outcome := self._decide(wanted), Busy):
            if isinstance(outcome, Booking):
                return outcome
            raise outcome
        placed: asyncio.Future[Booking] = asyncio.get_running_loop().create_future()
        entry = (turn, wanted, placed)
        insort(self._line, entry, key=lambda waiting: waiting[0])
        self.pump()
        try:
            async with asyncio.timeout_at(turn.until_s):
                return await asyncio.shield(placed)
        except TimeoutError:
            self._leave(entry)
            raise OverloadedError(
                "no capacity became free in time; try again later", retry_after_s=RETRY_AFTER_S
            ) from None
        except asyncio.CancelledError:
            self._leave(entry)
            raise

    def pump(self) -> None:
        """Place from the head of the line until somebody has to wait."""
        while self._line:
            _turn, wanted, placed = self._line[0]
            outcome = self._decide(wanted)
            if isinstance(outcome, Busy):
                return
            self._line.pop(0)
            if isinstance(outcome, Booking):
                placed.set_result(outcome)
            else:
                placed.set_exception(outcome)

    def _leave(self, entry: tuple[Turn, Wanted, asyncio.Future[Booking]]) -> None:
        """Stop waiting. A placement that was made in the same moment is given back."""
        placed = entry[2]
        if not placed.done():
            placed.cancel()
            self._line.remove(entry)
        elif placed.exception() is None:
            self._give_back(placed.result())
        self.pump()

    def _decide(self, wanted: Wanted) -> Booking | Busy | BatonError:
        try:
            outcome = self._try_place(wanted)
        except Exception:
            # Whoever pumps serves other requests: what is wrong with this one must end this one only.
            log.exception("a request could not be placed by a bug")
            return EngineError("the request could not be placed")
        if isinstance(outcome, NoPair):
            return NoUsablePairError(outcome.reason, retry_after_s=RETRY_AFTER_S)
        return outcome

    def _patience_ends(self) -> float:
        return asyncio.get_running_loop().time() + self._max_wait_s
