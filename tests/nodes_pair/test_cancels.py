"""Requests cancelled at random moments, over real loops, channels and transports, with a model that is none.

The full ten thousand are `python -m bench.cancels`, or ``pytest --cancels 10000``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench.cancels import SCHEMES, cancel_many


@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_nothing_is_left_of_cancelled_requests(
    scheme: str, block_sizes: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    num_requests = request.config.getoption("--cancels")
    result = await cancel_many(scheme, num_requests, block_sizes=block_sizes)
    assert result.acknowledged == num_requests
    assert result.blocks_freed > num_requests, "most were cancelled while they held nothing"
    # Looked at until nothing is held, for two seconds at most.
    assert (result.held, result.orphaned) == (0, 0)
    assert (result.new_threads, result.fds_grown) == ([], 0)
    assert len(result.moments) >= 5, f"cancelled in few states only: {result.moments}"
    assert any("running" in moment for moment in result.moments), f"none was decoding: {result.moments}"
