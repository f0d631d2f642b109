"""What ends a life of a node: word of its death, or a KV plane that broke."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from cluster.envelope import Envelope
from cluster.wire import Party, PeerDown
from engine.node import LifeEndedError, NodeLoop
from engine.service import _run_until
from kvtransfer.errors import PlaneBrokenError

ME = Party("N", 7, "tcp://127.0.0.1:1")
ROUTER = Party("R", 1, "tcp://127.0.0.1:2")


class Channel:
    """Hears one thing, then nothing more."""

    party = ME

    def __init__(self, body: object) -> None:
        self._heard = [] if body is None else [Envelope(ROUTER, 7, cast(Any, body))]

    async def receive(self) -> Envelope:
        if self._heard:
            return self._heard.pop()
        await asyncio.Event().wait()
        raise AssertionError


class Plane:
    """Breaks at its ``breaks_at``-th tick."""

    def __init__(self, breaks_at: int) -> None:
        self._left = breaks_at

    def tick(self, _now: float) -> None:
        self._left -= 1
        if not self._left:
            raise PlaneBrokenError("the transport tcp ended by itself: a bug")


async def end_of(body: object = None, breaks_at: int = 0) -> str:
    state = SimpleNamespace(tick=lambda _now: [], schedule=lambda _now: None, handle=lambda _event, _now: [])
    loop = NodeLoop(cast(Any, None), cast(Any, None), cast(Any, Channel(body)))
    with pytest.raises(LifeEndedError) as caught:
        await _run_until(asyncio.Event(), loop.run(cast(Any, state), cast(Any, Plane(breaks_at))))
    return str(caught.value)


async def test_a_broken_plane_ends_this_life() -> None:
    assert await end_of(breaks_at=2) == "the transport tcp ended by itself: a bug"


async def test_so_does_word_of_its_own_death() -> None:
    assert await end_of(PeerDown("N", 7)) == "R gave this node up for dead"
