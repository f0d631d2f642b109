"""One dispatch's messages: in order, those that are there together, and an end to waiting."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import DeadlineError
from cluster.request import RequestId, RequestKey
from cluster.wire import Party, TokenItem
from router.mailbox import MAX_TOGETHER, Mailbox
from router.policy import Placement

KEY = RequestKey(RequestId("r"), 1)
NODE = Party("n", 1, "tcp://127.0.0.1:1")


def mailbox() -> Mailbox:
    return Mailbox(KEY, Placement(NODE, NODE, "f", 16, 16))


def item(index: int) -> TokenItem:
    return TokenItem(KEY, index, (5,), None)


async def test_what_has_come_is_taken_together_and_in_order() -> None:
    box = mailbox()
    for index in range(MAX_TOGETHER + 3):
        box.put(item(index))
    assert await box.next(1, "late") == item(0)
    assert await box.next_together(1, "late") == [item(index) for index in range(1, MAX_TOGETHER + 1)]
    assert await box.next_together(1, "late") == [item(MAX_TOGETHER + 1), item(MAX_TOGETHER + 2)]


async def test_a_reader_that_waits_gets_what_comes() -> None:
    box = mailbox()
    reading = asyncio.create_task(box.next_together(20, "late"))
    await asyncio.sleep(0)
    box.put(item(0))
    box.put(item(1))
    assert await reading == [item(0), item(1)]


async def test_waiting_has_an_end() -> None:
    box = mailbox()
    with pytest.raises(DeadlineError, match="nothing came"):
        await box.next(0.001, "nothing came")
    box.put(item(0))
    assert await box.next(0, "late") == item(0)


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    box = mailbox()
    reading = asyncio.create_task(box.next(20, "late"))
    await asyncio.sleep(0)
    reading.cancel()
    box.put(item(0))
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await box.next(1, "late") == item(0)
