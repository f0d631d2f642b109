from __future__ import annotations

import pytest

from cluster.api_keys import ApiKey
from router.limits import KeyLimits

SLOW = ApiKey("slow", b"1" * 32, requests_per_minute=30)
NARROW = ApiKey("narrow", b"2" * 32, max_concurrent=2)
FREE = ApiKey("free", b"3" * 32)


def test_a_minute_s_requests_may_come_at_once_and_then_at_their_rate() -> None:
    limits = KeyLimits()
    assert [limits.enter(SLOW, 100.0) for _ in range(30)] == [None] * 30
    refusal = limits.enter(SLOW, 100.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(2.0)
    assert limits.enter(SLOW, 101.0) is not None
    assert limits.enter(SLOW, 102.0) is None
    assert limits.enter(SLOW, 102.0) is not None


def test_a_long_rest_gains_no_more_than_a_minute() -> None:
    limits = KeyLimits()
    for _ in range(30):
        limits.enter(SLOW, 0.0)
    assert [limits.enter(SLOW, 10_000.0) is None for _ in range(31)] == [True] * 30 + [False]


def test_no_more_run_at_once_than_may() -> None:
    limits = KeyLimits()
    assert limits.enter(NARROW, 0.0) is None
    assert limits.enter(NARROW, 0.0) is None
    assert limits.enter(NARROW, 0.0) is not None
    assert limits.running() == {"narrow": 2}
    limits.leave(NARROW)
    assert limits.enter(NARROW, 0.0) is None


def test_holders_do_not_take_from_each_other() -> None:
    limits = KeyLimits()
    while limits.enter(SLOW, 0.0) is None:
        pass
    assert limits.enter(NARROW, 0.0) is None
    assert all(limits.enter(FREE, 0.0) is None for _ in range(1000))


def test_processes_divide_a_limit_and_none_gets_nothing() -> None:
    limits = KeyLimits(share=4)
    assert [limits.enter(NARROW, 0.0) is None for _ in range(2)] == [True, False]
    assert [limits.enter(SLOW, 0.0) is None for _ in range(9)] == [True] * 8 + [False]
