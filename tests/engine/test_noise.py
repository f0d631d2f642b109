from __future__ import annotations

import math

import numpy as np
import pytest

from engine.noise import gumbel, ids_above, row_key

MASK64, MASK32 = (1 << 64) - 1, (1 << 32) - 1
VOCABULARY = 49_152


def plain_mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def plain_word(token_id: int, key: int) -> int:
    word = token_id
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & MASK32
    word = ((word ^ (word >> 15)) * 0x846CA68B) & MASK32
    word ^= word >> 16
    word = ((word ^ (key & MASK32)) * 0x9E3779B1) & MASK32
    word = (((word ^ (word >> 15)) + (key >> 32)) * 0x85EBCA77) & MASK32
    return word ^ (word >> 16)


def plain_gumbel(seed: int, choice: int, position: int, token_id: int) -> float:
    """The documented hash in Python integers: the oracle of the vectorised one."""
    key = plain_mix64((plain_mix64((plain_mix64(seed & MASK64) + choice) & MASK64) + position) & MASK64)
    bits = plain_word(token_id, key) << 20 | plain_word(token_id, plain_mix64(key)) & 0xFFFFF
    return -math.log(-math.log((bits + 0.5) / 2**52))


def noise_of(seed: int, choice: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    return gumbel(np.array([row_key(seed, choice, position)], np.uint64), token_ids, VOCABULARY)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63, 2**64 - 1, 2**70 + 3])
def test_noise_is_the_documented_hash(seed: int) -> None:
    token_ids = np.array([0, 1, 2, 511, 49_151])
    for choice in (0, 1, 127):
        for position in (0, 1, 8191, 131_071):
            expected = [plain_gumbel(seed, choice, position, token_id) for token_id in token_ids.tolist()]
            assert noise_of(seed, choice, position, token_ids).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_hash_never_changes() -> None:
    """A request that moves to a node of another version goes on with the same noise."""
    assert row_key(7, 1, 42) == 17859471183464076200
    assert noise_of(7, 1, 42, np.array([0, 5, 49_151])).tolist() == pytest.approx(
        [2.8986849620755035, -1.744047894032423, -0.8234011502704097], rel=1e-12
    )


@pytest.mark.parametrize("axis", ["token", "position", "seed", "choice"])
def test_noise_is_gumbel_and_uncorrelated_along_every_axis(axis: str) -> None:
    count = 20_000
    if axis == "token":
        noise = noise_of(3, 0, 5, np.arange(count))
    else:
        places = {"position": (3, 0, None), "seed": (None, 0, 3), "choice": (3, None, 5)}[axis]
        keys = [row_key(*(index if place is None else place for place in places)) for index in range(count)]
        noise = gumbel(np.array(keys, np.uint64), np.array([11]), VOCABULARY)
    deviation = math.pi / math.sqrt(6)
    assert noise.mean() == pytest.approx(0.5772, abs=4 * deviation / math.sqrt(count))
    assert noise.std() == pytest.approx(deviation, rel=0.03)
    centred = noise - noise.mean()
    for lag in (1, 2, 3, 64):
        correlation = (centred[lag:] * centred[:-lag]).mean() / np.square(centred).mean()
        assert abs(correlation) < 4 / math.sqrt(count)


def test_neighbouring_rows_share_nothing() -> None:
    """Not even shifted: each row's noise against the next positions', seeds' and choices' of nearby tokens."""
    token_ids = np.arange(20_000)
    here = noise_of(5, 0, 100, token_ids)
    here -= here.mean()
    for other in ((5, 0, 101), (6, 0, 100), (5, 1, 100), (5, 1, 99)):
        there = noise_of(*other, token_ids)
        there -= there.mean()
        for shift in range(4):
            correlation = (here[shift:] * there[: len(there) - shift]).mean() / (here.std() * there.std())
            assert abs(correlation) < 4.5 / math.sqrt(len(here))


def test_the_uniforms_are_uniform() -> None:
    uniform = np.exp(-np.exp(-noise_of(1, 2, 3, np.arange(VOCABULARY))))
    counts, _ = np.histogram(uniform, bins=64, range=(0.0, 1.0))
    chi_square = float(np.square(counts - VOCABULARY / 64).sum() / (VOCABULARY / 64))
    assert chi_square < 63 + 4 * math.sqrt(2 * 63)


@pytest.mark.parametrize("least", [-50.0, -6.0, -1.0, 0.0, 3.0, 9.0, 30.0, 800.0])
def test_ids_above_leaves_none_out(least: float) -> None:
    for position in range(20):
        noise = noise_of(9, 0, position, np.arange(VOCABULARY))
        found = ids_above(row_key(9, 0, position), least, VOCABULARY)
        assert set(np.flatnonzero(noise >= least).tolist()) <= set(found.tolist())
        assert len(found) <= (noise >= least).sum() + 3
