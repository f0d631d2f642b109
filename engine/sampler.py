"""Chooses tokens from logits. Stateless: noise is a hash of (seed, position, token id).

So a request draws the same tokens alone or with any batch mates, on either node, after preemption and after
failover, and there is no generator state to ship. Every row is computed by itself, in float64, so that nothing
of its batch shows in its rounding either.

A row with temperature ``T`` takes the token with the greatest ``logit / T + g``, where ``g`` is Gumbel noise:
this draws from softmax(logits / T) (the Gumbel-max trick), and restricting the race to the nucleus draws from the
renormalised nucleus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cluster.request import SamplingParams

NUM_CANDIDATES: Final = (256, 4096)

_MIN_TEMPERATURE: Final = 1e-9  # greedy in all but ties already; keeps the quotient finite

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT: Final = 31


@torch.inference_mode()
def sample(logits: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Choose one token id a row.

    ``logits``: finite float32 ``[num_rows, vocab_size]``; ``sampling`` and ``positions`` (the index in its sequence of
    the token being chosen) have ``num_rows`` entries. Equal logits go to the lowest id. If all rows are greedy the
    whole cost is one argmax.
    """
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    for row, params in enumerate(sampling):
        if not params.greedy:
            token_ids[row] = _sample_row(logits[row], params, positions[row])
    return token_ids


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each token id: float64 of the shape of ``token_ids`` (int64), always finite."""
    key = _mix_int(_mix_int(seed) + _mix_int(position ^ _GOLDEN))
    mixed = _mix_tensor(token_ids * _signed(_GOLDEN) + _signed(key))
    # 52 bits and a half: exactly representable and never 0 or 1, so neither logarithm meets its pole.
    uniform = _shift_right(mixed, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _sample_row(logits: Tensor, params: SamplingParams, position: int) -> int:
    scaled = logits.double() / max(params.temperature, _MIN_TEMPERATURE)
    if params.top_p >= 1.0:
        return _race(scaled, torch.arange(scaled.numel()), params.seed, position)
    nucleus = _nucleus(scaled, params.top_p)
    return _race(scaled[nucleus], nucleus, params.seed, position)


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """The fewest most likely token ids whose probabilities reach ``top_p``, likeliest first.

    Looks among the most likely few hundred, then few thousand, with the normaliser of the whole row: sorting a row
    takes ten times as long and is seldom needed.
    """
    normaliser = scaled.logsumexp(dim=0)
    for num_candidates in NUM_CANDIDATES:
        if num_candidates < scaled.numel():
            token_ids = scaled.topk(num_candidates).indices.sort().values
            nucleus = _prefix(scaled, token_ids, normaliser, top_p)
            # Among equals at the edge topk picks any, so a nucleus is trusted only if it ends above the edge.
            if scaled[nucleus[-1]] > scaled[token_ids].min():
                return nucleus
    return _prefix(scaled, torch.arange(scaled.numel()), normaliser, top_p)


def _prefix(scaled: Tensor, token_ids: Tensor, normaliser: Tensor, top_p: float) -> Tensor:
    """The fewest most likely of ``token_ids`` (ascending) whose probabilities reach ``top_p``, likeliest first."""
    ordered, order = scaled[token_ids].sort(descending=True, stable=True)
    reached = (ordered - normaliser).exp().cumsum(dim=0)
    num_kept = min(1 + int((reached < top_p).sum()), len(ordered))
    return token_ids[order[:num_kept]]


def _race(scaled: Tensor, token_ids: Tensor, seed: int, position: int) -> int:
    score = scaled + gumbel(seed, position, token_ids)
    return int(token_ids[score == score.max()].min())


def _mix_int(value: int) -> int:
    """The finaliser of splitmix64 on Python integers."""
    value = (value + _GOLDEN) & _MASK
    for shift, multiplier in _MIX:
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> _LAST_SHIFT)


def _mix_tensor(value: Tensor) -> Tensor:
    """The same (without the increment), in place on int64, whose products wrap modulo 2**64."""
    for shift, multiplier in _MIX:
        value.bitwise_xor_(_shift_right(value, shift)).mul_(_signed(multiplier))
    return value.bitwise_xor_(_shift_right(value, _LAST_SHIFT))


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask drops the copies of the sign.
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
