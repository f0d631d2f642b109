"""What a digest must see. Blocks are noise unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.digest import DIGEST_MODES, BlockIdentity, Digester, block_digest

BLOCK_BYTES = 737280
SIZES = [1, 63, 4096, 16384, 65536, 65536 + 8, BLOCK_BYTES]
WHO = BlockIdentity(ticket_id=0x123456789AB, index=5, generation=7)
NOISE = np.random.default_rng(3).integers(1, 256, (2, BLOCK_BYTES), np.uint8)
CHECKING = ("sampled", "full")
identities = st.builds(
    BlockIdentity, st.integers(1, (1 << 44) - 1), st.integers(0, (1 << 20) - 2), st.integers(0, (1 << 63) - 1)
)


# For ``off``, ``sampled``, ``full``.
FIXED = [0, 0x5C6B3F37C6198D5E, 0x3861DF0F29EB16E2]


def test_a_digest_is_for_ever() -> None:
    """Part of the wire format: if one of these changes, so must the wire version."""
    block = (np.arange(65536) * 7 % 251).astype(np.uint8)
    assert [block_digest(block, WHO, mode) for mode in DIGEST_MODES] == FIXED


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", CHECKING)
def test_equal_blocks_of_one_identity_have_equal_digests(mode, size):
    # In a pool a block may lie at any address.
    pool = np.zeros(3 * size + 1, np.uint8)
    pool[1 : size + 1] = pool[size + 1 : 2 * size + 1] = NOISE[0, :size]
    one, other = pool[1 : size + 1], pool[size + 1 : 2 * size + 1]
    assert block_digest(one, WHO, mode) == block_digest(other, WHO, mode) == block_digest(one.copy(), WHO, mode)
    assert block_digest(one, WHO, "off") == 0


@pytest.mark.parametrize("size", [1, 64, 4096, 65536])
def test_full_sees_every_byte(size):
    block = NOISE[0, :size].copy()
    right = block_digest(block, WHO, "full")
    for position in range(0, size, 1 if size <= 4096 else 13):
        block[position] ^= 1
        assert block_digest(block, WHO, "full") != right
        block[position] ^= 1


@settings(deadline=None, max_examples=200)
@given(st.integers(0, BLOCK_BYTES - 1), st.integers(1, 255), identities)
def test_full_sees_any_flip_in_a_block_of_the_model(position, flip, who):
    block = NOISE[0].copy()
    right = block_digest(block, who, "full")
    block[position] ^= flip
    assert block_digest(block, who, "full") != right


@settings(deadline=None, max_examples=100)
@given(identities, identities, st.sampled_from(CHECKING), st.sampled_from(SIZES))
def test_a_digest_of_another_identity_never_fits(one, other, mode, size):
    block = NOISE[0, :size]
    assert (block_digest(block, one, mode) == block_digest(block, other, mode)) == (one == other)


@pytest.mark.parametrize("field", ["ticket_id", "index", "generation"])
@pytest.mark.parametrize("mode", CHECKING)
def test_each_part_of_the_identity_counts(mode, field):
    # 64 positions further the same lines are sampled.
    other = replace(WHO, **{field: getattr(WHO, field) + 64})
    assert block_digest(NOISE[0], WHO, mode) != block_digest(NOISE[0], other, mode)


@settings(deadline=None, max_examples=100)
@given(identities, st.sampled_from(CHECKING), st.sampled_from(SIZES[1:]), st.data())
def test_both_modes_see_what_transfers_do_wrong(who, mode, size, data):
    block, foreign = NOISE[0, :size], NOISE[1, :size]
    cut = data.draw(st.integers(0, size - 1), label="truncated at")
    over_old, over_zero = foreign.copy(), np.zeros(size, np.uint8)
    over_old[:cut] = over_zero[:cut] = block[:cut]
    right = block_digest(block, who, mode)
    for wrong in (foreign, np.zeros(size, np.uint8), over_old, over_zero, np.roll(block, 1)):
        assert np.array_equal(wrong, block) or block_digest(wrong, who, mode) != right


@pytest.mark.parametrize("num_tokens", [1, 2, 15])
@pytest.mark.parametrize("key_order", ["token_major", "dim_major"])
def test_sampled_sees_a_nearly_empty_block_zeroed_or_swapped(key_order, num_tokens):
    """Unused slots are zero, so most samples of a last block are: never all of them."""
    blocks = np.zeros((2, 30, 2, 3, 16, 64), np.float32)
    blocks[..., :num_tokens, :] = np.random.default_rng(1).standard_normal((2, 30, 2, 3, num_tokens, 64))
    if key_order == "dim_major":
        blocks[:, :, 0] = blocks[:, :, 0].swapaxes(-1, -2).reshape(2, 30, 3, 16, 64)
    one, other = blocks.reshape(2, -1).view(np.uint8)
    for index in range(64):
        who = replace(WHO, index=index)
        right = block_digest(one, who, "sampled")
        half = one.copy()
        half[len(half) // 2 :] = 0
        for wrong in (np.zeros_like(one), other, half):
            assert block_digest(wrong, who, "sampled") != right


@settings(deadline=None, max_examples=200)
@given(identities, st.data())
def test_sampled_sees_every_long_damage(who, data):
    length = BLOCK_BYTES // 16 + 4096 + 128
    start = data.draw(st.integers(0, BLOCK_BYTES - length))
    block = NOISE[0].copy()
    right = block_digest(block, who, "sampled")
    block[start : start + length] ^= 0x40
    assert block_digest(block, who, "sampled") != right


def test_sampled_reads_other_lines_for_other_positions():
    seen = []
    for index in range(2):
        who, block = replace(WHO, index=index), np.zeros(65536, np.uint8)
        right = block_digest(block, who, "sampled")
        lines = set()
        for line in range(1024):
            block[line * 64] = 1
            if block_digest(block, who, "sampled") != right:
                lines.add(line)
            block[line * 64] = 0
        assert {0, 1023} < lines
        assert 18 <= len(lines) <= 33
        seen.append(lines)
    assert seen[0] != seen[1]


def test_the_digester_counts():
    pool = NOISE[:, :65536].copy()
    digester = Digester(pool, "sampled")
    digest = digester.take(0, WHO, "sampled")
    assert digester.fits(0, WHO, digest)
    assert digester.seconds > 0
    assert not digester.fits(1, WHO, digest)
    assert not digester.fits(0, WHO, None), "a block that came without a digest"
    assert digester.failures == 2
    assert digester.take(0, WHO, "full") != digest
    blind = Digester(pool, "off")
    assert blind.fits(0, WHO, None)
    assert (blind.failures, blind.seconds) == (0, 0.0)


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("size", [64, 4096, 16_384, 65_536, 737_280, 65_537])
def test_the_digester_takes_what_anybody_would_take_of_that_block(mode, size) -> None:
    pool = np.random.default_rng(size).integers(0, 256, (3, size), np.uint8)
    digester = Digester(pool, mode)
    for index in (0, 5, 63, 64, 1000):
        identity = BlockIdentity(7, index, 2)
        assert digester.take(2, identity, mode) == block_digest(pool[2], identity, mode)
    several = [(block, BlockIdentity(7, index, block)) for block, index in ((2, 0), (0, 63), (1, 64))]
    assert digester.take_all(several, mode) == [block_digest(pool[b], identity, mode) for b, identity in several]
    assert digester.take_all([], mode) == []
