"""Decode node fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from decode_bench import DecodeBench


@pytest.fixture
def bench() -> Iterator[DecodeBench]:
    """A decode node with 8 blocks of 4 tokens and 3 slots; at the end it must hold and promise nothing."""
    bench = DecodeBench()
    yield bench
    assert bench.states() == {}
    assert bench.pool.num_free == bench.pool.num_blocks == bench.state.load().free_blocks
