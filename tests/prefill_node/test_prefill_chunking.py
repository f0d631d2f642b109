"""How a step's budget is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.chunking import share_budget


@pytest.mark.parametrize(
    ("num_remaining", "budget", "shares"),
    [
        ([], 8, []),
        ([5], 8, [5]),
        ([8], 8, [8]),
        ([9], 8, [8]),
        ([100, 3], 8, [5, 3]),  # the short one is done at once, the oldest gets its quarter and what is left
        ([100, 6], 8, [2, 6]),
        ([100, 50], 8, [2, 6]),  # never less than a quarter for the oldest
        ([3, 100], 8, [3, 5]),
        ([1, 100], 8, [1, 7]),
        ([100, 4, 4, 4], 8, [2, 4, 2, 0]),  # equal ones in order of arrival
        ([2, 2, 2], 8, [2, 2, 2]),
        ([100, 100], 1, [1, 0]),
        ([100, 1], 3, [2, 1]),
        ([5, 5], 0, [0, 0]),
    ],
)
def test_shares(num_remaining: list[int], budget: int, shares: list[int]) -> None:
    assert share_budget(num_remaining, budget) == shares


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.integers(1, 600))
def test_the_budget_is_used_and_the_oldest_moves_on(num_remaining: list[int], budget: int) -> None:
    shares = share_budget(num_remaining, budget)
    assert sum(shares) == min(budget, sum(num_remaining))
    assert all(0 <= share <= left for share, left in zip(shares, num_remaining, strict=True))
    assert shares[0] >= min(num_remaining[0], max(1, budget // 4))


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    left, steps = 480, 0
    while left:
        left -= share_budget([left, 30, 30, 30], 32)[0]
        steps += 1
    assert steps <= 480 / 8
