"""Blocks from one GPU pool to another over UCX: as they are, or by way of pinned host memory. Needs a GPU."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from engine.kv_cache import DeviceKVCache  # noqa: E402
from kvtransfer.digest import DigestMode  # noqa: E402
from kvtransfer.events import BlocksArrived, BlocksSent, ReceiveFailed  # noqa: E402
from kvtransfer.layout import BlockLayout  # noqa: E402
from kvtransfer.select import open_plane  # noqa: E402
from kvtransfer.ticket import BlockHandle, new_ticket_id  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
LAYOUT = BlockLayout("bfloat16", 16, 8, 4, 64)
FROM, TO = [5, 0, 7], [2, 9, 4]


class Node:
    def __init__(self, name: str, digest: DigestMode) -> None:
        self.cache = DeviceKVCache(LAYOUT, 12, torch.device("cuda"))
        self.news = threading.Event()
        self.plane = open_plane(
            ["ucx"],
            self.cache.as_bytes(),
            (name, 1, "layout"),
            secret=None,
            wakeup=self.news.set,
            digest=digest,
            device=self.cache.device,
        )

    def wait(self, kind: type, count: int) -> None:
        until = time.monotonic() + 30
        while count > 0:
            assert time.monotonic() < until, self.plane.stats()
            self.news.wait(0.1)
            self.news.clear()
            for event in self.plane.poll():
                assert not isinstance(event, ReceiveFailed), event
                count -= len(event.indexes) if isinstance(event, kind) else 0


@pytest.mark.parametrize("digest", ["sampled", "full"])
@pytest.mark.parametrize("tls", [None, "^cuda"], ids=["as UCX can", "through host memory"])
def test_from_pool_to_pool(tls: str | None, digest: DigestMode, monkeypatch: pytest.MonkeyPatch) -> None:
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    p, d = Node("P", digest), Node("D", digest)
    try:
        p.cache.pool.copy_(torch.randn(p.cache.pool.shape))
        torch.cuda.synchronize()
        ticket_id, handles = new_ticket_id(), [BlockHandle(block, 1) for block in TO]
        d.plane.expect(ticket_id, handles)
        p.plane.push(d.plane.ticket(ticket_id, handles), list(enumerate(FROM)))
        d.wait(BlocksArrived, len(TO))
        d.plane.complete(ticket_id)
        p.wait(BlocksSent, len(TO))
        p.plane.finish_push(ticket_id)
        torch.cuda.synchronize()
        assert torch.equal(d.cache.pool[TO], p.cache.pool[FROM])
        rest = [block for block in range(12) if block not in TO]
        assert not d.cache.pool[rest].any()
        directly = p.plane._roads["ucx"].on_device
        assert not directly or tls is None
        assert bool(d.cache.as_bytes().any()) != directly
    finally:
        for node in (p, d):
            node.plane.close()
