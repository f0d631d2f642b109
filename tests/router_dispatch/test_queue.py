"""The waiting line: who is next, and what becomes of those who cannot wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import EngineError, NoUsablePairError, OverloadedError
from cluster.wire import Party
from router.naming import PromptNames
from router.policy import Booking, Busy, Demand, NoPair, Placement
from router.queue import Turn, WaitingLine, Wanted
from tests.cluster.redis_server import eventually

PLACEMENT = Placement(Party("p", 1, ""), Party("d", 1, ""), "f", 16, 16)


def wanted(size: int = 1) -> Wanted:
    return Wanted(Demand(size, size), PromptNames((1,), ""))


class Desk:
    """Room for so many requests; remembers who got it."""

    def __init__(self, room: int = 0, **options: Any) -> None:
        self.room = room
        self.outcome: Callable[[Wanted], Booking | Busy | NoPair] | None = None
        self.served: list[int] = []
        self.given_back = 0
        self.line = WaitingLine(self._try_place, self._give_back, **{"max_waiting": 10, "max_wait_s": 20.0, **options})

    def _try_place(self, request: Wanted) -> Booking | Busy | NoPair:
        if self.outcome is not None:
            return self.outcome(request)
        if not self.room:
            return Busy("full")
        self.room -= 1
        self.served.append(request.demand.prompt_len)
        return Booking(PLACEMENT, request.demand.prompt_len)

    def _give_back(self, _booking: Booking) -> None:
        self.given_back += 1
        self.room += 1

    def free(self, count: int = 1) -> None:
        self.room += count
        self.line.pump()

    async def queue(self, size: int, priority: int = 0) -> asyncio.Task[Booking]:
        """One more that waits."""
        waiting = len(self.line)
        task = asyncio.create_task(self.line.wait(self.line.turn(priority), wanted(size)))
        await eventually(lambda: len(self.line) == waiting + 1)
        return task


async def _cancelled(task: asyncio.Task[Booking]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_room_is_given_at_once() -> None:
    desk = Desk(room=1)
    assert (await desk.line.wait(desk.line.turn(), wanted())).placement == PLACEMENT
    assert len(desk.line) == 0


async def test_first_come_first_served_within_a_priority() -> None:
    desk = Desk()
    tasks = [await desk.queue(size, priority) for size, priority in ((1, 1), (2, 0), (3, 1), (4, 0), (5, -1))]
    for _ in tasks:
        desk.free()
    await asyncio.gather(*tasks)
    assert desk.served == [5, 2, 4, 1, 3]


async def test_a_turn_is_kept() -> None:
    """Who is refused goes back to its own place, before those who came later."""
    desk = Desk(room=1)
    turn = desk.line.turn()
    await desk.line.wait(turn, wanted(1))
    later = await desk.queue(2)
    again = asyncio.create_task(desk.line.wait(turn, wanted(1)))
    await eventually(lambda: len(desk.line) == 2)
    desk.free(2)
    await asyncio.gather(later, again)
    assert desk.served == [1, 1, 2]


async def test_nobody_overtakes_the_head() -> None:
    desk = Desk()
    large = await desk.queue(100)
    small = await desk.queue(1)
    asked: list[int] = []

    def only_small(request: Wanted) -> Booking | Busy:
        asked.append(request.demand.prompt_len)
        return Booking(PLACEMENT, 1) if request.demand.prompt_len == 1 else Busy("too large for now")

    desk.outcome = only_small
    desk.line.pump()
    assert asked == [100]
    await _cancelled(large)
    await small
    assert asked == [100, 1], "when the head leaves, the next one is tried at once"


async def test_leaving_frees_the_place() -> None:
    desk = Desk()
    tasks = [await desk.queue(size) for size in (1, 2, 3)]
    await _cancelled(tasks[1])
    assert len(desk.line) == 2
    desk.free(2)
    await asyncio.gather(tasks[0], tasks[2])
    assert desk.served == [1, 3]
    assert desk.given_back == 0


async def test_a_placement_that_comes_with_the_cancellation_is_given_back() -> None:
    desk = Desk()
    leaving = await desk.queue(1)
    staying = await desk.queue(2)
    desk.free()
    assert desk.served == [1]
    await _cancelled(leaving)
    await staying
    assert desk.given_back == 1
    assert desk.served == [1, 2]


async def test_patience_ends() -> None:
    desk = Desk(max_wait_s=0.02)
    with pytest.raises(OverloadedError) as caught:
        await desk.line.wait(desk.line.turn(), wanted())
    assert caught.value.status == 429
    assert caught.value.retry_after_s
    assert len(desk.line) == 0
    desk.free()
    assert desk.served == []


async def test_patience_counts_over_all_waits_of_a_turn() -> None:
    desk = Desk(room=1, max_wait_s=0.02)
    turn = desk.line.turn()
    await desk.line.wait(turn, wanted())
    await eventually(lambda: asyncio.get_running_loop().time() > turn.until_s)
    with pytest.raises(OverloadedError):
        await desk.line.wait(turn, wanted())
    desk.room = 1
    await desk.line.wait(turn, wanted())  # with room at once, nobody has to be patient
    renewed = desk.line.renew(turn)
    assert renewed == turn
    assert renewed.until_s > turn.until_s


async def test_a_full_line_turns_new_ones_away_and_only_those() -> None:
    desk = Desk(max_waiting=2)
    early = desk.line.turn()
    tasks = [await desk.queue(size) for size in (1, 2)]
    with pytest.raises(OverloadedError) as caught:
        desk.line.turn()
    assert caught.value.retry_after_s
    back = asyncio.create_task(desk.line.wait(early, wanted(9)))
    await eventually(lambda: len(desk.line) == 3)
    desk.free(3)
    await asyncio.gather(back, *tasks)
    assert desk.served == [9, 1, 2]
    desk.line.turn()


async def test_without_nodes_everybody_is_told() -> None:
    desk = Desk()
    tasks = [await desk.queue(size) for size in (1, 2, 3)]
    desk.outcome = lambda _request: NoPair("no decode node is alive")
    desk.line.pump()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, NoUsablePairError)
        assert "decode" in result.message
    assert len(desk.line) == 0


async def test_an_error_that_comes_with_the_cancellation_is_no_loose_end() -> None:
    """An exception that nobody retrieves would be reported when the future is collected."""
    desk = Desk()
    task = await desk.queue(1)
    desk.outcome = lambda _request: NoPair("nobody")
    desk.line.pump()
    await _cancelled(task)
    assert desk.given_back == 0


async def test_a_bug_with_one_request_ends_that_one_only(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    tasks = [await desk.queue(size) for size in (1, 2)]

    def broken(request: Wanted) -> Booking:
        if request.demand.prompt_len == 1:
            raise ZeroDivisionError
        return Booking(PLACEMENT, 2)

    desk.outcome = broken
    desk.line.pump()
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, EngineError)
    assert isinstance(second, Booking)
    assert "bug" in caplog.text


def test_turns_are_ordered_by_priority_and_arrival_only() -> None:
    assert Turn(0, 5, 1.0) < Turn(1, 0, 0.0)
    assert Turn(0, 1, 9.0) < Turn(0, 2, 1.0)
    assert Turn(0, 1, 1.0) == Turn(0, 1, 2.0)
