"""Ownership of blocks: who may write, share, free, and in which order cached prefixes die."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool, BlockPoolError, OutOfBlocksError


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    """Every test gives back what it took."""
    pool = BlockPool(4)
    yield pool
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks
    assert pool.report() == []


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    """Free blocks that carry these names, the prefix ``names`` in one go."""
    blocks = pool.allocate(len(names), "filler")
    for block_id, name in zip(blocks, names, strict=True):
        pool.name(block_id, name)
    pool.release(blocks, "filler")
    return blocks


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_too_many_blocks_take_none(pool: BlockPool) -> None:
    with pytest.raises(OutOfBlocksError):
        pool.allocate(5, "a")
    assert pool.num_free == 4
    assert pool.release(pool.allocate(4, "a"), "a") == 4


def test_allocating_starts_a_new_generation_and_sharing_does_not(pool: BlockPool) -> None:
    (block_id,) = cached(pool, b"x")
    generation = pool.generation(block_id)
    pool.share([block_id], "a")
    pool.release([block_id], "a")
    assert pool.generation(block_id) == generation
    taken = pool.allocate(4, "a")
    assert pool.generation(block_id) == generation + 1
    assert pool.match([b"x"]) == []
    pool.release(taken, "a")


def test_nameless_blocks_are_used_up_before_a_prefix_is_evicted(pool: BlockPool) -> None:
    blocks = cached(pool, b"x", b"x2")
    taken = pool.allocate(2, "a")
    assert not set(taken) & set(blocks)
    assert pool.match([b"x", b"x2"]) == blocks
    pool.release(taken, "a")


def test_a_prefix_dies_from_its_end_and_the_oldest_first(pool: BlockPool) -> None:
    old = cached(pool, b"old", b"old2")
    new = cached(pool, b"new", b"new2")
    order = [pool.allocate(1, f"a{i}")[0] for i in range(4)]
    assert order == [old[1], old[0], new[1], new[0]]
    for i, block_id in enumerate(order):
        pool.release([block_id], f"a{i}")


def test_use_makes_a_prefix_young_again(pool: BlockPool) -> None:
    (old,) = cached(pool, b"old")
    (new,) = cached(pool, b"new")
    pool.share(pool.match([b"old"]), "a")
    pool.release([old], "a")
    taken = pool.allocate(3, "a")
    assert new in taken
    assert pool.match([b"old"]) == [old]
    pool.release(taken, "a")


def test_match_stops_at_the_first_gap(pool: BlockPool) -> None:
    blocks = cached(pool, b"1", b"2", b"3")
    assert pool.match([b"1", b"2", b"9", b"3"]) == blocks[:2]
    assert pool.num_free_among(blocks) == 3
    pool.share(blocks[:1], "a")
    assert pool.num_free_among(blocks) == 2
    assert pool.num_free == 3
    pool.release(blocks[:1], "a")


def test_a_shared_block_is_free_when_its_last_owner_goes(pool: BlockPool) -> None:
    (block_id,) = cached(pool, b"x")
    pool.share([block_id], "a")
    pool.share([block_id], "b")
    assert [report.owners for report in pool.report()] == [("a", "b")]
    assert pool.release([block_id], "a") == 0
    assert pool.num_free == 3
    assert pool.release([block_id], "b") == 1


def test_only_a_sole_owner_may_write_and_only_a_nameless_block(pool: BlockPool) -> None:
    (block_id,) = pool.allocate(1, "a")
    assert pool.is_writable(block_id, "a")
    assert not pool.is_writable(block_id, "b")
    pool.name(block_id, b"x")
    assert not pool.is_writable(block_id, "a")
    pool.release([block_id], "a")
    assert not pool.is_writable(block_id, "a")


def test_the_first_block_of_a_name_keeps_it(pool: BlockPool) -> None:
    first, second = pool.allocate(2, "a")
    pool.name(first, b"x")
    pool.name(second, b"x")
    pool.name(first, b"y")
    assert pool.match([b"x"]) == [first]
    assert pool.match([b"y"]) == []
    assert pool.is_writable(second, "a")
    assert pool.num_named == 1
    pool.release([first, second], "a")


def test_double_free_and_foreign_release_are_refused(pool: BlockPool) -> None:
    blocks = pool.allocate(1, "a")
    with pytest.raises(BlockPoolError, match="does not own"):
        pool.release(blocks, "b")
    pool.release(blocks, "a")
    with pytest.raises(BlockPoolError, match="double free"):
        pool.release(blocks, "a")


def test_sharing_needs_a_name_and_naming_an_owner(pool: BlockPool) -> None:
    blocks = pool.allocate(1, "a")
    with pytest.raises(BlockPoolError, match="no name"):
        pool.share(blocks, "b")
    pool.name(blocks[0], b"x")
    with pytest.raises(BlockPoolError, match="already owns"):
        pool.share(blocks, "a")
    pool.release(blocks, "a")
    with pytest.raises(BlockPoolError, match="not owned"):
        pool.name(blocks[0], b"y")


def test_a_quarantined_block_is_neither_free_nor_owned(pool: BlockPool) -> None:
    blocks = pool.allocate(2, "a")
    pool.quarantine(blocks, "a")
    assert (pool.num_free, pool.num_quarantined) == (2, 2)
    assert {report.state for report in pool.report()} == {"quarantined"}
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3, "b")
    with pytest.raises(BlockPoolError):
        pool.release(blocks, "a")
    with pytest.raises(BlockPoolError, match="not owned"):
        pool.name(blocks[0], b"x")
    with pytest.raises(BlockPoolError, match="not quarantined for b"):
        pool.end_quarantine(blocks, "b")
    pool.check_integrity()
    assert pool.end_quarantine(blocks, "a") == 2
    with pytest.raises(BlockPoolError, match="not quarantined"):
        pool.end_quarantine(blocks, "a")


def test_what_others_read_is_never_quarantined(pool: BlockPool) -> None:
    blocks = pool.allocate(1, "a")
    pool.name(blocks[0], b"x")
    with pytest.raises(BlockPoolError, match="shared or named"):
        pool.quarantine(blocks, "a")
    pool.release(blocks, "a")
    with pytest.raises(BlockPoolError, match="shared or named"):
        pool.quarantine(blocks, "a")


def test_a_forgotten_name_is_found_no_more_but_readers_keep_the_block(pool: BlockPool) -> None:
    (block_id,) = cached(pool, b"x")
    pool.share([block_id], "a")
    pool.share([block_id], "b")
    pool.forget_names([block_id])
    assert pool.match([b"x"]) == []
    pool.release([block_id], "a")
    assert pool.release([block_id], "b") == 1


@pytest.mark.parametrize(
    ("steps", "added", "removed"),
    [
        ("+", [b"x"], []),
        ("+-", [], []),
        ("+-+", [b"x"], []),
        ("+!", [], []),
        ("+!-", [], [b"x"]),
        ("+!-+", [], []),
        ("+!-+-", [], [b"x"]),
    ],
)
def test_the_directory_hears_of_net_changes(
    pool: BlockPool, steps: str, added: list[bytes], removed: list[bytes]
) -> None:
    """+ names the block, - evicts it, ! is the directory's read; an evicted name must never be left standing."""
    for step in steps:
        match step:
            case "+":
                cached(pool, b"x")
            case "-":
                pool.release(pool.allocate(4, "evictor"), "evictor")
            case _:
                pool.drain_name_changes()
    assert pool.drain_name_changes() == (added, removed)
    assert pool.drain_name_changes() == ([], [])


def test_a_fork_shares_blocks_with_and_without_names_until_the_last_lets_go(pool: BlockPool) -> None:
    blocks = pool.allocate(2, "a")
    pool.name(blocks[0], b"x")
    generations = [pool.generation(block_id) for block_id in blocks]
    pool.fork(blocks, "a", ["a/0", "a/1", "a/2"])
    assert {report.owners for report in pool.report()} == {("a/0", "a/1", "a/2")}
    assert not pool.is_writable(blocks[1], "a/0")
    with pytest.raises(BlockPoolError, match="does not own"):
        pool.release(blocks, "a")
    assert pool.release(blocks, "a/1") == pool.release(blocks, "a/0") == 0
    assert pool.is_writable(blocks[1], "a/2")
    assert [pool.generation(block_id) for block_id in blocks] == generations
    assert pool.release(blocks, "a/2") == 2
    assert pool.match([b"x"]) == blocks[:1]


def test_only_an_owner_forks_and_only_into_somebody_new(pool: BlockPool) -> None:
    blocks = pool.allocate(1, "a")
    for owner, forks in (("b", ["b/0"]), ("a", []), ("a", ["c", "c"])):
        with pytest.raises(BlockPoolError):
            pool.fork(blocks, owner, forks)
    pool.release(blocks, "c")


@given(st.lists(st.tuples(st.sampled_from("asnfrqedk"), st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_no_order_of_calls_breaks_the_books(calls: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(4)
    held: dict[str, list[int]] = {f"o{i}": [] for i in range(6)}
    quarantined: dict[str, list[int]] = {f"o{i}": [] for i in range(6)}
    published: set[bytes] = set()
    for call, who, number in calls:
        owner, name = f"o{who}", bytes([number])
        blocks = held[owner]
        if call == "a" and number <= pool.num_free:
            held[owner] = blocks + pool.allocate(number, owner)
        elif call == "s" and (found := pool.match([name])) and found[0] not in blocks:
            pool.share(found, owner)
            held[owner] = blocks + found
        elif call == "n" and blocks:
            pool.name(blocks[-1], name)
        elif call == "f":
            pool.forget_names(blocks)
        elif call == "r":
            pool.release(blocks, owner)
            held[owner] = []
        elif call == "k":
            forks = [fork for fork in dict.fromkeys((f"o{number}", f"o{(number + 1) % 6}")) if not held[fork]]
            if forks:
                pool.fork(blocks, owner, forks)
                held |= {fork: list(blocks) for fork in forks} | {owner: []}
        elif call == "q":
            private = [block_id for block_id in blocks if pool.is_writable(block_id, owner)]
            pool.quarantine(private, owner)
            quarantined[owner] += private
            held[owner] = [block_id for block_id in blocks if block_id not in private]
        elif call == "e":
            pool.end_quarantine(quarantined[owner], owner)
            quarantined[owner] = []
        else:
            added, removed = pool.drain_name_changes()
            assert published.isdisjoint(added)
            assert published.issuperset(removed)
            published = (published - set(removed)) | set(added)
            assert all(pool.match([name]) for name in published)
        pool.check_integrity()
    for owner in held:
        pool.release(held[owner], owner)
        pool.end_quarantine(quarantined[owner], owner)
    assert pool.num_free == pool.num_blocks
