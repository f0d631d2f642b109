"""Which CPUs each node gets."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cli.cores import share_cores


@pytest.mark.parametrize(
    ("cpus", "num_nodes", "expected"),
    [
        ([0], 1, [(0,)]),
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1, 2], 2, [(0, 1), (2,)]),
        ([4, 6, 7, 9, 11], 3, [(4, 6), (7, 9), (11,)]),
        ([0, 1, 2, 3], 1, [(0, 1, 2, 3)]),
        ([0, 1], 3, [(0,), (1,), (0,)]),
        ([5], 3, [(5,), (5,), (5,)]),
    ],
)
def test_table(cpus: list[int], num_nodes: int, expected: list[tuple[int, ...]]) -> None:
    assert share_cores(cpus, num_nodes) == expected


@pytest.mark.parametrize(("cpus", "num_nodes"), [([], 1), ([0], 0), ([0], -1)])
def test_nothing_to_share(cpus: list[int], num_nodes: int) -> None:
    with pytest.raises(ValueError):
        share_cores(cpus, num_nodes)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=64, unique=True), st.integers(1, 80))
@settings(deadline=None)
def test_shares_are_disjoint_complete_and_even_while_there_is_a_choice(cpus: list[int], num_nodes: int) -> None:
    shares = share_cores(cpus, num_nodes)
    assert len(shares) == num_nodes
    assert all(shares)
    if num_nodes <= len(cpus):
        assert [cpu for share in shares for cpu in share] == cpus
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
