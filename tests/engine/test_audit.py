"""Blocks that nobody will give back are found, whoever holds them."""

from __future__ import annotations

from engine.audit import Held, find_orphans
from engine.block_pool import BlockPool


def orphans(pool: BlockPool, held: dict[str, Held]) -> list[int]:
    return [report.block_id for report in find_orphans(pool.report(), held)]


def test_books_that_agree() -> None:
    pool = BlockPool(8)
    one = pool.allocate(3, "one")
    pool.name(one[0], b"n" * 16)
    pool.share([one[0]], "two")
    pool.quarantine(one[2:], "one")
    assert orphans(pool, {"one": Held(one[:2], one[2:]), "two": Held([one[0]])}) == []
    assert orphans(BlockPool(8), {"idle": Held([])}) == []


def test_the_owner_is_gone() -> None:
    pool = BlockPool(8)
    owned, quarantined = pool.allocate(2, "gone"), pool.allocate(1, "gone too")
    pool.quarantine(quarantined, "gone too")
    assert orphans(pool, {"other": Held([])}) == sorted(owned + quarantined)


def test_the_owner_has_lost_sight_of_it() -> None:
    pool = BlockPool(8)
    one = pool.allocate(3, "one")
    assert orphans(pool, {"one": Held(one[:2])}) == one[2:]
    # Owned, but the request waits for it in quarantine: it will be given back by the wrong door.
    assert orphans(pool, {"one": Held(one[:2], one[2:])}) == one[2:]


def test_one_of_two_owners_is_gone() -> None:
    pool = BlockPool(8)
    block = pool.allocate(1, "one")
    pool.name(block[0], b"n" * 16)
    pool.share(block, "gone")
    assert orphans(pool, {"one": Held(block)}) == block
