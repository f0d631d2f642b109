"""How much room a request needs, and when there is none."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from decode_bench import SETTINGS, make_reserve
from hypothesis import given
from hypothesis import strategies as st

from decode_node.reservation import FULL_RETRY_S, NoRoom, Room, find_room
from engine.block_pool import BlockPool


def with_cached(num_blocks: int, num_named: int, *, owned: bool = False) -> BlockPool:
    """A pool that holds the first ``num_named`` blocks of the prompt 0, 1, 2 …"""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(num_named, "filler")
    for block_id, name in zip(blocks, make_reserve(4 * num_named).block_hashes, strict=True):
        pool.name(block_id, name)
    if not owned:
        pool.release(blocks, "filler")
    return pool


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_emitted", "cached", "missing", "growth"),
    [
        (1, 1, 0, 0, 1, 0),
        (3, 2, 0, 0, 1, 0),  # four tokens are stored: the fifth never is
        (3, 3, 0, 0, 1, 1),
        (4, 1, 0, 0, 1, 0),
        (4, 2, 0, 0, 1, 1),
        (4, 5, 0, 0, 1, 1),
        (4, 6, 0, 0, 1, 2),
        (10, 5, 0, 0, 3, 1),
        (10, 5, 0, 2, 1, 1),  # the partial block is always sent
        (8, 5, 0, 2, 0, 1),  # a hit on every block: nothing is sent
        (8, 1, 0, 2, 0, 0),
        (10, 8, 5, 0, 3, 0),
        (10, 5, 5, 0, 3, 0),
        (10, 0, 0, 0, 3, 0),
        (32, 1, 0, 0, 8, 0),  # the whole pool
        (20, 13, 0, 0, 5, 3),
    ],
)
def test_room(prompt_len: int, max_tokens: int, num_emitted: int, cached: int, missing: int, growth: int) -> None:
    pool = with_cached(8, cached)
    reserve = make_reserve(prompt_len, max_tokens=max_tokens, num_emitted=num_emitted)
    room = find_room(reserve, SETTINGS, pool, num_held=0, num_promised=0)
    assert isinstance(room, Room)
    assert (len(room.shared), room.num_missing, room.growth) == (cached, missing, growth)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "retry_after_s"),
    [
        (0, 5, None),
        (33, 1, None),  # the prompt alone is over the pool
        (20, 14, None),  # the prompt fits, the answer does not
        (30, 12, None),  # over the model's context as well
        (32, 1, FULL_RETRY_S),  # fits an empty pool only
        (9, 16, FULL_RETRY_S),
    ],
)
def test_no_room(prompt_len: int, max_tokens: int, retry_after_s: float | None) -> None:
    pool = BlockPool(8)
    pool.allocate(3, "somebody")
    reserve = make_reserve(prompt_len, max_tokens=max_tokens)
    answer = find_room(reserve, SETTINGS, pool, num_held=1, num_promised=0)
    assert isinstance(answer, NoRoom)
    assert answer.retry_after_s == retry_after_s


@pytest.mark.parametrize("num_hashes", [0, 1, 3])
def test_hashes_that_do_not_fit_the_prompt_never_fit(num_hashes: int) -> None:
    reserve = msgspec.structs.replace(make_reserve(10), block_hashes=(b"x" * 16,) * num_hashes)
    answer = find_room(reserve, SETTINGS, BlockPool(8), num_held=0, num_promised=0)
    assert isinstance(answer, NoRoom)
    assert answer.retry_after_s is None


def test_slots_promises_and_context_are_limits() -> None:
    reserve = make_reserve(10, max_tokens=5)
    full = find_room(reserve, SETTINGS, BlockPool(8), num_held=3, num_promised=0)
    assert isinstance(full, NoRoom)
    assert full.retry_after_s == FULL_RETRY_S
    assert isinstance(find_room(reserve, SETTINGS, BlockPool(8), num_held=2, num_promised=4), Room)
    assert isinstance(find_room(reserve, SETTINGS, BlockPool(8), num_held=2, num_promised=5), NoRoom)
    short = replace(SETTINGS, max_model_len=14)
    assert isinstance(find_room(reserve, short, BlockPool(8), num_held=0, num_promised=0), Room)
    short = replace(SETTINGS, max_model_len=13)
    assert find_room(reserve, short, BlockPool(8), num_held=0, num_promised=0) == NoRoom(
        "prompt and max_tokens exceed the model's context", None
    )


def test_a_free_cached_block_costs_as_much_as_any_a_shared_one_nothing() -> None:
    reserve = make_reserve(16, max_tokens=1)
    assert isinstance(find_room(reserve, SETTINGS, with_cached(8, 4), num_held=0, num_promised=4), Room)
    assert isinstance(find_room(reserve, SETTINGS, with_cached(8, 4), num_held=0, num_promised=5), NoRoom)
    assert isinstance(find_room(reserve, SETTINGS, with_cached(8, 4, owned=True), num_held=1, num_promised=4), Room)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_choices", "missing", "growth"),
    [
        (4, 1, 3, 1, 0),  # all end at token 0: nothing is stored
        (6, 1, 3, 2, 0),
        (4, 2, 3, 1, 3),  # a block for each
        (6, 2, 3, 2, 2),  # the partial block is one choice's, and copied for two
        (6, 3, 3, 2, 2),
        (6, 4, 3, 2, 5),
        (7, 6, 2, 2, 3),
        (1, 5, 3, 1, 5),
    ],
)
def test_room_for_several_choices(
    prompt_len: int, max_tokens: int, num_choices: int, missing: int, growth: int
) -> None:
    reserve = make_reserve(prompt_len, max_tokens=max_tokens, num_choices=num_choices)
    room = find_room(reserve, SETTINGS, BlockPool(8), num_held=0, num_promised=0)
    assert isinstance(room, Room)
    assert (room.num_missing, room.growth) == (missing, growth)
    smaller = replace(SETTINGS, num_blocks=missing + growth - 1)
    never = find_room(reserve, smaller, BlockPool(8), num_held=0, num_promised=0)
    assert isinstance(never, NoRoom)
    assert never.retry_after_s is None
    later = find_room(reserve, SETTINGS, BlockPool(8), num_held=0, num_promised=9 - missing - growth)
    assert later == NoRoom("not enough free KV blocks", FULL_RETRY_S)


@given(
    prompt_len=st.integers(1, 40),
    max_tokens=st.integers(1, 40),
    cached=st.integers(0, 8),
    owned=st.booleans(),
    promised=st.integers(0, 8),
)
def test_a_grant_never_breaks_a_promise(
    prompt_len: int, max_tokens: int, cached: int, owned: bool, promised: int
) -> None:
    pool = with_cached(8, cached, owned=owned)
    promised = min(promised, pool.num_free)
    reserve = make_reserve(prompt_len, max_tokens=max_tokens)
    room = find_room(reserve, SETTINGS, pool, num_held=0, num_promised=promised)
    if isinstance(room, NoRoom):
        return
    num_stored = prompt_len + max_tokens - 1
    assert len(room.shared) + room.num_missing == -(-prompt_len // 4)
    assert len(room.shared) + room.num_missing + room.growth == -(-num_stored // 4)
    pool.share(room.shared, "r")
    pool.allocate(room.num_missing, "r")
    assert pool.num_free >= promised + room.growth
