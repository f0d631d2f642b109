"""Noise without a generator: a hash of (seed, choice, position, token id), the same on every node and in any batch.

So there is no state to ship, and a request draws the same tokens alone or with any batch mates, on either node, after
preemption and after failover. Integers modulo 2**32 give the same bits however the work is cut.

A row's 64-bit key is the splitmix64 finaliser chained over seed, choice and position. A token's id is scrambled once
(the `lowbias32` finaliser, a table of the vocabulary) and mixed with both halves of the key; a second pass under
another key gives the low bits, which only the few tokens that can win need.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MASK64: Final = (1 << 64) - 1
_GOLDEN64: Final = 0x9E3779B97F4A7C15
_MIX64: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT64: Final = 31
# lowbias32: the 32-bit finaliser with the least bias known for two multiplications (Chris Wellons, hash-prospector).
_MIX32: Final = ((16, 0x7FEB352D), (15, 0x846CA68B))
_LAST_SHIFT32: Final = 16
_KEYED_MULTIPLIERS: Final = (0x9E3779B1, 0x85EBCA77)

_LOW_BITS: Final = 20
_SPAN: Final = 2**32


def row_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one row's noise. ``seed`` is any integer, taken modulo 2**64."""
    key = _finalise64(seed & _MASK64)
    return _finalise64((_finalise64((key + choice) & _MASK64) + position) & _MASK64)


def gumbel(keys: Keys, token_ids: Ids, vocab_size: int) -> Floats:
    """Standard Gumbel noise of tokens (ids below ``vocab_size``) in rows of these :func:`row_key`, always finite.

    ``keys`` and ``token_ids`` are broadcast against each other.
    """
    scrambled = _scrambled(vocab_size)[token_ids]
    bits = _keyed(scrambled, keys).astype(np.uint64) << np.uint64(_LOW_BITS)
    bits |= _keyed(scrambled, _second_keys(keys)) & np.uint32((1 << _LOW_BITS) - 1)
    # 52 bits and a half: exactly representable and never 0 or 1, so neither logarithm meets its pole.
    noise: Floats = -np.log(-np.log((bits + 0.5) * 2.0 ** -(32 + _LOW_BITS)))
    return noise


def ids_above(key: int, least: float, vocab_size: int) -> Ids:
    """Every token id of a row whose noise is ``least`` or more, and possibly a few with less; ascending.

    One pass of integer arithmetic over the vocabulary, no logarithm.
    """
    uniform = math.exp(-math.exp(-max(least, -5.0)))
    bound = max(0, math.floor(_SPAN * uniform) - 2)
    return np.flatnonzero(_keyed(_scrambled(vocab_size), np.array([key], np.uint64)) >= np.uint32(bound))


@lru_cache(maxsize=4)
def _scrambled(vocab_size: int) -> Words:
    words = np.arange(vocab_size, dtype=np.uint32)
    for shift, multiplier in _MIX32:
        words ^= words >> np.uint32(shift)
        words *= np.uint32(multiplier)
    words ^= words >> np.uint32(_LAST_SHIFT32)
    words.flags.writeable = False
    return words


def _keyed(scrambled: Words, keys: Keys) -> Words:
    """Mix each token's word with its row's key."""
    words: Words = scrambled ^ keys.astype(np.uint32)
    words *= np.uint32(_KEYED_MULTIPLIERS[0])
    words ^= words >> np.uint32(15)
    words += (keys >> np.uint64(32)).astype(np.uint32)
    words *= np.uint32(_KEYED_MULTIPLIERS[1])
    words ^= words >> np.uint32(16)
    return words


def _second_keys(keys: Keys) -> Keys:
    """Another key for each key: splitmix64 once more."""
    mixed = keys + np.uint64(_GOLDEN64)
    for shift, multiplier in _MIX64:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(_LAST_SHIFT64))


def _finalise64(value: int) -> int:
    """splitmix64 on a Python integer."""
    value = (value + _GOLDEN64) & _MASK64
    for shift, multiplier in _MIX64:
        value = ((value ^ (value >> shift)) * multiplier) & _MASK64
    return value ^ (value >> _LAST_SHIFT64)
