from __future__ import annotations

import pytest

from bench.transfer import ROADS, Case, TransferBench, _cases
from bench.transfer_node import Notes
from bench.transfer_nodes import ROWS, hidden_seconds
from kvtransfer.routes import TRANSPORT_KINDS
from kvtransfer.select import SCHEMES


def test_the_rows_that_are_asked_for_are_there() -> None:
    names = {case.name for case in _cases()}
    assert {"ucx_shm_512k_x64", "ucx_tcp_512k_x64", "nixl_tcp_512k_x64", "tcp_512k_x64", "nixl_shm_64k_x256"} <= names
    assert {"overlap_tcp_1024", "token0_delay"} <= set(ROWS)
    assert all(road.scheme in SCHEMES and road.required in TRANSPORT_KINDS for road in ROADS)


def test_a_run_is_long_enough_to_be_measured_and_short_enough_to_wait_for() -> None:
    for case in _cases():
        shape = Case(case.road, case.size, case.count).shape
        assert shape.num_bytes >= min(64 << 20, 64 * shape.block_bytes * shape.count)
        assert shape.num_bytes <= 512 << 20


@pytest.mark.parametrize(
    ("pushes", "arrivals", "expected"),
    [
        # the first chunk travels while the second is computed, the second after it
        ([(1.0, (0,)), (2.0, (1,))], {0: 1.5, 1: 2.25}, (0.5, 0.75)),
        # two at a time are one transfer; the last block of a chunk counts
        ([(1.0, (0, 1)), (1.25, (2,))], {0: 1.125, 1: 1.5, 2: 1.75}, (0.75, 0.75)),
        # one that goes on when the last step ends is hidden so far
        ([(1.5, (0,))], {0: 3.0}, (0.5, 1.5)),
        # a chunk without blocks is none
        ([(0.5, ()), (2.0, (0,))], {0: 3.0}, (0.0, 1.0)),
    ],
)
def test_what_travels_before_the_last_step_ends_is_hidden(
    pushes: list[tuple[float, tuple[int, ...]]], arrivals: dict[int, float], expected: tuple[float, float]
) -> None:
    notes = Notes(steps=[(0.0, 1.0), (1.0, 2.0)], pushes=pushes)
    assert hidden_seconds(notes, arrivals) == expected


def test_only_what_is_named_is_measured() -> None:
    class Args:
        json, runs, only, model = True, 5, "ucx_tcp_512k_x64", ""

    bench = TransferBench(Args())  # type: ignore[arg-type]
    assert [case.name for case in _cases() if bench._wanted(case.name)] == ["ucx_tcp_512k_x64"]
