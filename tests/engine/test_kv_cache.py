from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine.kv_cache import DeviceKVCache, KVCache, kv_cache  # noqa: E402
from engine.step import BlockCopy  # noqa: E402
from kvtransfer.layout import BlockLayout  # noqa: E402
from kvtransfer.shared_memory import map_peer  # noqa: E402


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_and_tensor_are_one_memory(dtype: str, shared: bool) -> None:
    layout = BlockLayout(dtype, 16, 2, 3, 8)
    cache = KVCache(layout, 5, shared=shared)
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


def test_a_shared_pool_is_what_a_peer_maps() -> None:
    cache = KVCache(BlockLayout("float32", 16, 2, 3, 8), 4, shared=True)
    assert cache.memory is not None
    theirs = map_peer(cache.memory.name)
    cache.pool[2] = 1.5
    assert theirs is not None
    assert (theirs.bytes.reshape(4, -1) == cache.as_bytes()).all()


def test_without_shared_memory_there_is_a_pool_all_the_same(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr("os.memfd_create", forbidden)
    cache = KVCache(BlockLayout("float32", 16, 2, 3, 8), 4, shared=True)
    assert cache.memory is None
    assert not cache.as_bytes().any()
    assert "slower: seccomp" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
def test_a_big_pool_takes_no_memory_until_used(shared: bool) -> None:
    before = resident_bytes()
    cache = KVCache(BlockLayout("float32", 16, 30, 3, 64), 2900, shared=shared)  # 2 GiB
    assert resident_bytes() - before < 64 << 20
    assert cache.as_bytes().nbytes > 2_000_000_000


def test_a_device_and_its_host_side_see_what_is_copied() -> None:
    """The host's memory plays the GPU: the two sides are apart all the same."""
    layout = BlockLayout("bfloat16", 4, 2, 3, 8)
    sender, receiver = (DeviceKVCache(layout, 6, torch.device("cpu")) for _ in range(2))
    sender.pool.copy_(torch.randn(sender.pool.shape))
    assert not sender.as_bytes().any()
    sender.zero_tail(4, 1)
    sender.to_host([1, 4])
    receiver.as_bytes()[[5, 0]] = sender.as_bytes()[[1, 4]]
    assert not receiver.pool.any()
    receiver.from_host([5, 0])
    assert torch.equal(receiver.pool[[5, 0]], sender.pool[[1, 4]])
    assert not receiver.pool[0, :, :, :, 1:].any()
    assert not receiver.pool[1:5].any()
    assert not sender.as_bytes()[[0, 2, 3, 5]].any()


def test_what_a_transport_reads_of_a_device() -> None:
    layout = BlockLayout("float32", 16, 2, 3, 8)
    cache = DeviceKVCache(layout, 5, torch.device("cpu"))
    cache.pool.copy_(torch.randn(cache.pool.shape))
    blocks = cache.pool.view(5, -1).view(torch.uint8).numpy()
    assert cache.device is cache
    assert (cache.row(3) == blocks[3]).all()
    cache.row(2)[:] = 9
    assert (blocks[2] == 9).all()
    assert (cache.read([4, 0], None) == blocks[[4, 0]]).all()
    lines = np.array([[0, 7, 5], [1, 1, 2]])
    found = cache.read([4, 0], lines)
    expected = np.stack([blocks[block].reshape(-1, 64)[each] for block, each in zip((4, 0), lines, strict=True)])
    assert (found == expected).all()


def test_on_the_cpu_there_is_one_side_only() -> None:
    assert type(kv_cache(BlockLayout("float32", 16, 2, 3, 8), 3, torch.device("cpu"))) is KVCache


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_blocks_go_to_a_gpu_and_come_back() -> None:
    cache = kv_cache(BlockLayout("float32", 16, 2, 3, 8), 3, torch.device("cuda"))
    assert isinstance(cache, DeviceKVCache)
    cache.as_bytes()[1] = 7
    cache.from_host([1])
    cache.copy_blocks([BlockCopy(1, 2)])
    torch.cuda.synchronize()
    cache.to_host([2])
    assert (cache.as_bytes()[2] == 7).all()
    assert not cache.as_bytes()[0].any()


def resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
