"""Prefill node fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefill_bench import PrefillBench


@pytest.fixture
def bench() -> Iterator[PrefillBench]:
    """A prefill node with 8 blocks of 4 tokens, at most 8 tokens a step; at the end it must hold nothing."""
    bench = PrefillBench()
    yield bench
    assert bench.states() == {}
    assert bench.pool.num_free == bench.pool.num_blocks
