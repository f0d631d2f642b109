from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from engine.kv_cache import KVCache  # noqa: E402
from kvtransfer.layout import BlockLayout  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_and_tensor_are_one_memory(dtype: str) -> None:
    layout = BlockLayout(dtype, 16, 2, 3, 8)
    cache = KVCache(layout, 5)
    view = cache.as_bytes()
    assert view.shape == (5, layout.block_bytes)
    assert cache.pool.shape == (5, 2, 2, 3, 16, 8)
    assert not view.any()
    cache.pool[3] = 1.5
    assert view[3].any()
    assert not view[2].any()
    assert not view[4].any()
    view[2] = view[3]
    assert torch.equal(cache.pool[2], cache.pool[3])


def test_a_block_is_one_contiguous_run() -> None:
    cache = KVCache(BlockLayout("float32", 16, 2, 3, 8), 4)
    assert cache.pool.is_contiguous()
    assert cache.as_bytes()[1].flags.c_contiguous


def test_zero_tail_clears_only_later_slots() -> None:
    cache = KVCache(BlockLayout("float32", 16, 2, 3, 8), 3)
    cache.pool.fill_(1.0)
    cache.zero_tail(1, 5)
    assert (cache.pool[1, :, :, :, :5] == 1).all()
    assert (cache.pool[1, :, :, :, 5:] == 0).all()
    assert (cache.pool[[0, 2]] == 1).all()
    cache.zero_tail(1, 0)
    assert not cache.as_bytes()[1].any()


def test_a_big_pool_takes_no_memory_until_used() -> None:
    before = resident_bytes()
    cache = KVCache(BlockLayout("float32", 16, 30, 3, 64), 2900)  # 2 GiB
    assert resident_bytes() - before < 64 << 20
    assert cache.as_bytes().nbytes > 2_000_000_000


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
