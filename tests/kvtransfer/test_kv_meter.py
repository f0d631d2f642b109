"""How transfers went, counted by a clock that the test moves."""

from __future__ import annotations

import pytest

from kvtransfer.meter import BUCKETS, TransferMeter


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> TransferMeter:
    return TransferMeter(clock)


def test_time_counts_while_a_block_moves_and_as_hidden_while_a_step_runs(meter: TransferMeter, clock: Clock) -> None:
    clock.now += 100  # nothing moves
    assert meter.stats().overlap_ratio == 0.0
    meter.moving(3)
    clock.now += 2
    with meter.computing():
        clock.now += 5
        meter.moving(-2)
        clock.now += 1
    meter.moving(1)
    clock.now += 2
    meter.moving(-2)
    with meter.computing():
        clock.now += 70  # nothing moves
    stats = meter.stats()
    assert (stats.moving_s, stats.hidden_s) == (10.0, 6.0)
    assert stats.overlap_ratio == 0.6


def test_what_is_under_way_counts_already(meter: TransferMeter, clock: Clock) -> None:
    meter.moving(1)
    with meter.computing():
        clock.now += 3
        assert (meter.stats().moving_s, meter.stats().hidden_s) == (3.0, 3.0)


def test_a_step_that_raises_is_over(meter: TransferMeter, clock: Clock) -> None:
    def step() -> None:
        with meter.computing():
            clock.now += 1
            raise ZeroDivisionError

    meter.moving(1)
    with pytest.raises(ZeroDivisionError):
        step()
    clock.now += 1
    assert (meter.stats().moving_s, meter.stats().hidden_s) == (2.0, 1.0)


def test_ends_and_durations(meter: TransferMeter) -> None:
    for seconds in (0.0005, 0.001, 0.002, 99.0):
        meter.ended("send", "done", seconds)
    meter.ended("receive", "failed", 0.5)
    stats = meter.stats()
    assert stats.outcomes["send", "done"] == 4
    assert stats.outcomes["receive", "failed"] == 1
    assert sum(stats.outcomes.values()) == 5
    assert set(stats.outcomes) == {
        (side, how) for side in ("send", "receive") for how in ("done", "cancelled", "failed")
    }
    assert stats.durations["send"].counts == (2, 1) + (0,) * (len(BUCKETS) - 2) + (1,)
    assert stats.durations["send"].total_s == pytest.approx(99.0035)
