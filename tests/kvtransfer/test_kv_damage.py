"""On every transport: a block that does not hold what was sent never arrives, and its ticket hears of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from kv_harness import SCHEMES, Node

from kvtransfer.events import ReceiveFailed
from kvtransfer.ticket import BlockHandle

BLOCK_BYTES = 65536
pytestmark = pytest.mark.parametrize("scheme", SCHEMES)
Damage = Callable[[np.ndarray], None]


def pair(nodes, scheme: str, digest: str, **options) -> tuple[Node, Node]:
    """The sender's own setting is the opposite: the receiver's is what counts."""
    other = "off" if digest != "off" else "full"
    p = nodes(scheme, "P", seed=1, block_bytes=BLOCK_BYTES, digest=other)
    return p, nodes(scheme, "D", block_bytes=BLOCK_BYTES, digest=digest, **options)


def damage_before_the_check(d: Node, monkeypatch: pytest.MonkeyPatch, victim: int, damage: Damage) -> None:
    """Between landing and check, on the transport's thread."""
    (digester,) = d.digesters()
    fits = digester.fits

    def damaged(block_id, identity, digest) -> bool:
        if block_id == victim:
            damage(d.pool[block_id])
        return fits(block_id, identity, digest)

    monkeypatch.setattr(digester, "fits", damaged)


def flip(position: int) -> Damage:
    def damage(block: np.ndarray) -> None:
        block[position] ^= 1

    return damage


def overwrite(first: int, value: int | np.ndarray) -> Damage:
    def damage(block: np.ndarray) -> None:
        block[first:] = value

    return damage


FOREIGN = np.random.default_rng(9).integers(0, 256, BLOCK_BYTES, np.uint8)
KINDS = {
    "zeroed": overwrite(0, 0),
    "foreign": overwrite(0, FOREIGN),
    "truncated": overwrite(BLOCK_BYTES * 2 // 3, FOREIGN[BLOCK_BYTES * 2 // 3 :]),
    "last byte missing": flip(BLOCK_BYTES - 1),
}


def expect_one_failure(p: Node, d: Node) -> None:
    """Of three blocks the second is bad."""
    ticket = d.grant([3, 9, 4])
    p.plane.push(ticket, [(0, 0), (1, 1), (2, 2)])
    failed = d.wait_kind(ReceiveFailed, ticket.ticket_id)
    assert failed == ReceiveFailed(ticket.ticket_id, "block 1 does not hold what was sent")
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0, 2})
    stats = d.plane.stats()
    assert (stats.digest_failures, stats.blocks_received) == (1, 2)
    d.plane.withdraw(ticket.ticket_id)


@pytest.mark.parametrize("position", [0, 1, 4095, 30000, BLOCK_BYTES - 1])
def test_full_finds_one_flipped_byte(nodes, scheme, monkeypatch, position):
    p, d = pair(nodes, scheme, "full")
    damage_before_the_check(d, monkeypatch, 9, flip(position))
    expect_one_failure(p, d)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("digest", ["sampled", "full"])
def test_what_transfers_do_wrong_is_found(nodes, scheme, monkeypatch, digest, kind):
    p, d = pair(nodes, scheme, digest)
    d.pool[:] = 0xAB
    damage_before_the_check(d, monkeypatch, 9, KINDS[kind])
    expect_one_failure(p, d)


@pytest.mark.parametrize("digest", ["sampled", "full"])
def test_a_block_of_the_same_ticket_in_the_wrong_place(nodes, scheme, monkeypatch, digest):
    p, d = pair(nodes, scheme, digest)
    damage_before_the_check(d, monkeypatch, 9, overwrite(0, p.pool[2].copy()))
    expect_one_failure(p, d)


@pytest.mark.parametrize("digest", ["sampled", "full"])
def test_a_block_that_its_sender_lost_while_it_waited(nodes, scheme, monkeypatch, digest):
    """Final when it was pushed, somebody else's when it is read: the sender's own fault, found by the receiver."""
    p, d = pair(nodes, scheme, digest)
    sends = p.plane._context.sends
    take = sends.take

    def late(push):
        item = take(push)
        if item is not None and item.index == 1:
            p.pool[item.block_id] = FOREIGN
        return item

    monkeypatch.setattr(sends, "take", late)
    expect_one_failure(p, d)


@pytest.mark.parametrize("digest", ["sampled", "full"])
def test_a_stale_generation_never_arrives(nodes, scheme, digest):
    p, d = pair(nodes, scheme, digest)
    ticket = d.grant([3])
    p.plane.push(msgspec.structs.replace(ticket, handles=(BlockHandle(3, 6),)), [(0, 0)])
    d.wait_for(lambda: d.plane.stats().blocks_refused or d.plane.stats().digest_failures)
    d.seen += d.plane.poll()
    assert not d.arrived(ticket.ticket_id)
    # The right one still can.
    q = nodes(scheme, "Q", seed=2, block_bytes=BLOCK_BYTES)
    q.plane.push(ticket, [(0, 5)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[3], q.pool[5])


def test_off_looks_at_nothing(nodes, scheme, monkeypatch):
    p, d = pair(nodes, scheme, "off")
    damage_before_the_check(d, monkeypatch, 9, KINDS["zeroed"])
    ticket = d.grant([9])
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0})
    for node in (p, d):
        stats = node.plane.stats()
        assert (stats.digest_failures, stats.digest_seconds) == (0, 0.0)


def test_many_small_chunks_and_one_large(nodes, scheme):
    """More blocks than one introduction names, in chunks that come while others are on their way."""
    p = nodes(scheme, "P", seed=1, num_blocks=400, block_bytes=512)
    d = nodes(scheme, "D", num_blocks=400, block_bytes=512)
    ticket = d.grant(range(400))
    indexes = np.random.default_rng(0).permutation(400).tolist()
    p.plane.push(ticket, [(i, i) for i in indexes[:200]])
    for start in range(200, 400, 10):
        p.plane.push(ticket, [(i, i) for i in indexes[start : start + 10]])
    d.wait_for(lambda: len(d.arrived(ticket.ticket_id)) == 400)
    assert np.array_equal(d.pool, p.pool)
    assert d.plane.stats().digest_failures == 0
    assert d.plane.stats().digest_seconds > 0
    d.plane.complete(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)
