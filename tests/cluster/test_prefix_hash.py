"""Names of prefixes: one input, one name, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cluster.prefix_hash import HASH_BYTES, block_hashes, child_hash, seed_hash

parts = st.tuples(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))


@given(parts, parts)
@settings(deadline=None)
def test_different_seeds_have_different_names(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (seed_hash(*one) == seed_hash(*other)) == (one == other)


@given(st.text(min_size=3, max_size=9), st.data())
@settings(deadline=None)
def test_no_two_splits_of_one_text_collide(text: str, data: st.DataObject) -> None:
    cuts = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    (a, b), (c, d) = data.draw(cuts), data.draw(cuts)
    one, other = (text[:a], text[a:b], text[b:]), (text[:c], text[c:d], text[d:])
    assert (seed_hash(*one) == seed_hash(*other)) == (one == other)


def test_salt_and_adapter_are_different_things() -> None:
    assert seed_hash("f", cache_salt="x") != seed_hash("f", adapter="x")
    assert seed_hash("f", cache_salt="\0") != seed_hash("f")


def test_any_text_is_a_salt() -> None:
    assert len(seed_hash("f", "\ud800")) == HASH_BYTES


token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(token_lists, token_lists, st.integers(1, 8))
@settings(deadline=None)
def test_blocks_have_one_name_exactly_if_their_prefixes_are_equal(one: list[int], other: list[int], size: int) -> None:
    seed = seed_hash("layout")
    for index, (a, b) in enumerate(zip(block_hashes(seed, one, size), block_hashes(seed, other, size), strict=False)):
        end = (index + 1) * size
        assert (a == b) == (one[:end] == other[:end])


@given(token_lists, st.integers(1, 8))
@settings(deadline=None)
def test_only_full_blocks_have_names_and_they_chain(tokens: list[int], size: int) -> None:
    seed = seed_hash("layout")
    names = block_hashes(seed, tuple(tokens), size)
    assert len(names) == len(tokens) // size
    parent = seed
    for index, name in enumerate(names):
        parent = child_hash(parent, tokens[index * size : (index + 1) * size])
        assert name == parent
        assert len(name) == HASH_BYTES


def test_the_same_tokens_after_another_prefix_or_in_another_size_are_other_blocks() -> None:
    seed = seed_hash("layout")
    assert child_hash(seed, [1, 2]) != child_hash(child_hash(seed, [1, 2]), [1, 2])
    assert set(block_hashes(seed, range(64), 16)).isdisjoint(block_hashes(seed, range(64), 32))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_none_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        child_hash(seed_hash("layout"), [token])


def test_every_process_finds_the_same_names() -> None:
    program = (
        "from cluster.prefix_hash import *;"
        "print(b''.join(block_hashes(seed_hash('l', 'salt', 'a'), range(48), 16)).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    }
    assert found == {b"".join(block_hashes(seed_hash("l", "salt", "a"), range(48), 16)).hex()}
