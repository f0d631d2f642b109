"""A pool on a GPU, played by host memory: which blocks go as they are, and which by way of the twin."""

from __future__ import annotations

import numpy as np
import pytest
from kv_harness import DIRECT, MAPPED, Node, PlayedGpu

from kvtransfer.digest import BlockIdentity, DeviceDigester, Digester
from kvtransfer.layout import BlockLayout
from kvtransfer.regroup import run_of

BLOCK_BYTES = 64 << 10
FROM, TO = [5, 0, 7], [2, 9, 4]


def node(nodes, scheme, name: str, **options) -> Node:
    return nodes(scheme, name, block_bytes=BLOCK_BYTES, **options)


def move(p: Node, d: Node, blocks: list[int], places: list[int]) -> None:
    ticket = d.grant(places)
    p.plane.push(ticket, list(enumerate(blocks)))
    d.wait_for(lambda: len(d.arrived(ticket.ticket_id)) == len(blocks))
    d.plane.complete(ticket.ticket_id)
    p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == len(blocks))
    p.plane.finish_push(ticket.ticket_id)


@pytest.mark.parametrize("scheme", [DIRECT, "ucx", "tcp", "inproc"])
@pytest.mark.parametrize("digest", ["sampled", "full", "off"])
def test_from_gpu_to_gpu(nodes, scheme, digest):
    """This machine's UCX knows none, so only one that is told so goes directly."""
    p, d = node(nodes, scheme, "P", seed=1, gpu=True, digest=digest), node(nodes, scheme, "D", gpu=True, digest=digest)
    move(p, d, FROM, TO)
    assert np.array_equal(d.pool[TO], p.pool[FROM])
    untouched = np.delete(np.arange(16), TO)
    assert not d.pool[untouched].any()
    assert (p.device.staged, d.device.staged) == (([], []) if scheme == DIRECT else (FROM, TO))
    if scheme == DIRECT:
        assert not p.device.twin.any()
        assert not d.device.twin.any()


@pytest.mark.parametrize("kinds", [(DIRECT, "ucx"), ("ucx", DIRECT), (MAPPED, DIRECT), (DIRECT, MAPPED)], ids=str)
def test_between_a_gpu_and_host_memory(nodes, kinds):
    p, d = node(nodes, kinds[0], "P", seed=1), node(nodes, kinds[1], "D")
    for _ in range(2):
        move(p, d, FROM, TO)
        assert np.array_equal(d.pool[TO], p.pool[FROM])
        d.pool[:] = 0


def test_a_ticket_that_is_filled_over_two_roads(nodes):
    """What came by way of the twin is copied to the GPU, what came as it is stays as it is."""
    d = node(nodes, [DIRECT, "tcp"], "D")
    p, q = node(nodes, DIRECT, "P", seed=1), node(nodes, "tcp", "Q", seed=2)
    ticket = d.grant([3, 8])
    p.plane.push(ticket, [(0, 1)])
    q.plane.push(ticket, [(1, 2)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0, 1})
    assert not d.pool[8].any()
    d.plane.complete(ticket.ticket_id)
    assert np.array_equal(d.pool[[3, 8]], [p.pool[1], q.pool[2]])
    assert d.device.staged == [8]


def test_tokens_cut_for_another_block_size_go_by_way_of_the_twin(nodes):
    ours, theirs = (BlockLayout("float32", size, 2, 1, 64) for size in (16, 24))
    p, d = nodes(DIRECT, "P", seed=1, layout=ours), nodes(DIRECT, "D", layout=theirs)
    ticket, table = d.grant([6]), [4, 1]
    p.plane.push(ticket, [(0, run_of(table, 0, 24, 16))])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    d.plane.complete(ticket.ticket_id)
    tokens = np.concatenate([p.pool[block].view(np.uint32).reshape(ours.block_shape) for block in table], axis=3)
    assert np.array_equal(d.pool[6].view(np.uint32).reshape(theirs.block_shape), tokens[:, :, :, :24])
    assert (p.device.staged, d.device.staged) == (table, [])


@pytest.mark.parametrize("mode", ["sampled", "full", "off"])
@pytest.mark.parametrize("block_bytes", [40, 4096, BLOCK_BYTES])
def test_digests_of_a_gpu_are_those_of_the_same_bytes_in_host_memory(mode, block_bytes):
    pool = np.random.default_rng(1).integers(0, 256, (6, block_bytes), np.uint8)
    twin = np.zeros_like(pool)
    host, books = Digester(pool, mode), Digester(twin, mode)
    device = DeviceDigester(twin, books, PlayedGpu(pool, twin))
    blocks = [(block, BlockIdentity(11, 70 + block, 3)) for block in (4, 0, 5)]
    assert device.take_all(blocks, mode) == host.take_all(blocks, mode)
    assert device.take(*blocks[0], mode) == host.take(*blocks[0], mode)
    assert device.take_all([], mode) == []
    if mode != "off":
        assert not device.fits(*blocks[0], 1)
        assert (books.failures, device.failures) == (1, 1)
        assert books.seconds == device.seconds > 0
