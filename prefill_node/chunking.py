"""How one step's token budget is shared among the prompts being prefilled. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(num_remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens each prompt gets in this step; ``num_remaining`` is in order of arrival, all at least 1.

    A quarter of the budget goes to the oldest, so that it moves on whatever else arrives; the rest goes to the
    prompts with the least left to do, so that a short one never waits for a long one. The shares sum to
    ``min(budget, sum(num_remaining))``.
    """
    shares = [0] * len(num_remaining)
    if not shares or budget < 1:
        return shares
    shares[0] = min(num_remaining[0], max(1, budget // 4))
    left = budget - shares[0]
    for index in sorted(range(len(shares)), key=lambda i: (num_remaining[i], i)):
        more = min(num_remaining[index] - shares[index], left)
        shares[index] += more
        left -= more
    return shares
