"""Draws a token for each row that samples: the Gumbel race among the tokens that the row's filters leave.

The token with the greatest ``logit / T + g``, where ``g`` is Gumbel noise, is a draw from softmax(logits / T) (the
Gumbel-max trick), and the race among the tokens of a filter is a draw from their renormalised distribution.

Most rows' filters end within the few most likely tokens, and the race is run among those. The rows whose do not
(plain sampling is one of them) are the fallback: their winner is found in the whole vocabulary, still without
computing its noise everywhere. Tokens that are not candidates are no more likely than the last candidate, so only one
whose noise makes up for that can win: a comparison of integers finds these few (:func:`engine.noise.ids_above`), and
each is asked, best first, whether the filters let it pass. That is as good as racing within the filter, and it needs
no order of the vocabulary. Both ways give the same token; which is taken depends on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from cluster.request import SamplingParams
from engine.candidates import Candidates, Logits, top, weights
from engine.noise import Floats, Ids, Keys, gumbel, ids_above, row_key
from kernels.host import exp_sums

NUM_CANDIDATES: Final = 96

_MIN_TEMPERATURE: Final = 1e-9  # greedy in all but ties already; keeps the quotient finite
_UNLIMITED: Final = 2**62

Flags = npt.NDArray[np.bool_]
ExpSums = Callable[[Logits, Ids, Logits, Logits], Floats]
"""As :func:`kernels.host.exp_sums`."""


def race(
    logits: Logits, sampling: Sequence[SamplingParams], positions: Sequence[int], sums: ExpSums = exp_sums
) -> list[int | None]:
    """A token id for each row, or None if all its logits are -inf.

    ``logits``: ``[num_rows, vocab_size]`` without NaN or +inf; ``sampling`` (none greedy) and ``positions``
    (the index in its sequence of the token to be drawn) have ``num_rows`` entries. ``sums``: what sums whole rows.
    """
    field = _line_up(logits, sampling, positions)
    found, num_candidates = field.found, field.distance.shape[1]
    last = _last_to_pass(field, _total_mass(field, sums))
    score = field.distance + gumbel(field.keys[:, None], found.token_ids, logits.shape[1])
    passing = np.arange(num_candidates) < last[:, None]
    rows = np.arange(len(last))
    best = np.where(passing, score, -np.inf).argmax(axis=1)
    winners: list[int | None] = found.token_ids[rows, best].tolist()
    # Which of the equals at the edge are candidates is chance: a filter is trusted only if it ends above the edge.
    above_edge = found.logits > found.logits[:, -1:]
    settled = field.whole | ((last <= num_candidates) & above_edge[rows, np.minimum(last, num_candidates) - 1])
    if not settled.all():
        sure = passing & (above_edge | field.unfiltered[:, None])
        unsettled = np.flatnonzero(~settled)
        for row, winner in zip(unsettled.tolist(), _race_in_full(field, unsettled, score, sure), strict=True):
            winners[row] = winner
    for row in np.flatnonzero(np.isneginf(found.logits[:, 0])).tolist():
        winners[row] = None
    return winners


@dataclass(frozen=True, slots=True)
class _Field:
    """All rows' candidates and filters: arrays ``[num_rows, num_candidates]`` or ``[num_rows]``.

    ``distance`` is (logit - greatest logit) / T, ``mass`` the sum of exp(distance) up to and with each candidate.
    ``whole`` rows have all their tokens that are not banned among the candidates. ``num_left`` candidates pass
    ``min_p`` and ``top_k``; if ``limited``, no other token does. ``cut`` rows have one of these two filters. ``lanes``
    are those looked at so far, ``totals`` the sums known for them.
    """

    logits: Logits
    sampling: Sequence[SamplingParams]
    keys: Keys
    found: Candidates
    greatest: Logits
    temperature: Logits
    distance: Floats
    mass: Floats
    whole: Flags
    num_left: Ids
    limited: Flags
    cut: Flags
    top_p: Floats
    lanes: dict[int, _Lane]
    totals: dict[int, float]

    @property
    def unfiltered(self) -> Flags:
        """Rows in which every token may win."""
        return ~self.cut & (self.top_p >= 1.0)

    def lane(self, row: int) -> _Lane:
        """That row's whole vocabulary."""
        if row not in self.lanes:
            self.lanes[row] = _Lane(
                self.logits[row], self.sampling[row], self.temperature[row], self.greatest[row], self.totals.get(row)
            )
        return self.lanes[row]


def _line_up(logits: Logits, sampling: Sequence[SamplingParams], positions: Sequence[int]) -> _Field:
    keys = [row_key(one.seed, one.choice, position) for one, position in zip(sampling, positions, strict=True)]
    found = top(logits, NUM_CANDIDATES)
    greatest = np.where(np.isneginf(found.logits[:, 0]), np.float32(0), found.logits[:, 0])
    temperature = np.array([max(one.temperature, _MIN_TEMPERATURE) for one in sampling], np.float32)
    distance = (found.logits.astype(np.float64) - greatest[:, None]) / temperature[:, None]
    floor = np.array([_log(one.min_p) for one in sampling])
    top_k = np.array([one.top_k or _UNLIMITED for one in sampling])
    passing = (distance >= floor[:, None]) & (distance > -np.inf)
    num_left = np.minimum(passing.sum(axis=1), top_k)
    whole = np.isneginf(found.logits[:, -1]) | found.whole
    return _Field(
        logits=logits,
        sampling=sampling,
        keys=np.array(keys, np.uint64),
        found=found,
        greatest=greatest,
        temperature=temperature,
        distance=distance,
        mass=np.exp(distance).cumsum(axis=1),
        whole=whole,
        num_left=num_left,
        limited=whole | (num_left < distance.shape[1]),
        cut=(floor > -np.inf) | (top_k < _UNLIMITED),
        top_p=np.array([one.top_p for one in sampling]),
        lanes={},
        totals={},
    )


def _total_mass(field: _Field, sums: ExpSums) -> Floats:
    """The sum of exp(distance) over all tokens that pass ``min_p`` and ``top_k``; inf where nobody asks for it."""
    ends = np.maximum(field.num_left, 1) - 1
    total = np.where(field.limited, field.mass[np.arange(len(ends)), ends], np.inf)
    asked = (field.top_p < 1.0) & ~field.limited
    whole_rows = np.flatnonzero(asked & ~field.cut)
    if len(whole_rows):
        scales = np.float32(1) / field.temperature[whole_rows]
        total[whole_rows] = sums(field.logits, whole_rows, field.greatest[whole_rows], scales)
        field.totals.update(zip(whole_rows.tolist(), total[whole_rows].tolist(), strict=True))
    for row in np.flatnonzero(asked & field.cut).tolist():
        total[row] = field.lane(row).total
    return total


def _last_to_pass(field: _Field, total: Floats) -> Ids:
    """How many candidates pass all filters; more than there are if other tokens may pass too."""
    nucleus = (field.mass < (field.top_p * total)[:, None]).sum(axis=1) + 1
    return np.minimum(
        np.where(field.limited, field.num_left, _UNLIMITED), np.where(field.top_p < 1.0, nucleus, _UNLIMITED)
    )


def _race_in_full(field: _Field, rows: Ids, score: Floats, sure: Flags) -> list[int]:
    """The winners of ``rows`` among all tokens that pass their filters. Of the candidates, the ``sure`` ones pass.

    No token but a candidate is nearer than the last candidate. So only those can beat the best of the sure ones that
    have the noise for it, and that noise does not depend on where they are.
    """
    vocab_size = field.logits.shape[1]
    lanes = [field.lane(row) for row in rows.tolist()]
    # The first of the most likely passes any filter.
    fallback = np.array([0 if sure[row].any() else lane.logits.argmax() for row, lane in zip(rows, lanes, strict=True)])
    best = np.where(sure[rows], score[rows], -np.inf).argmax(axis=1)
    reference = np.where(sure[rows].any(axis=1), field.found.token_ids[rows, best], fallback)
    distance = np.array([lane.distance(token_id) for lane, token_id in zip(lanes, reference, strict=True)])
    least = distance + gumbel(field.keys[rows], reference, vocab_size) - field.distance[rows, -1]
    runners = [
        np.append(ids_above(int(key), float(noise), vocab_size), token_id)
        for key, noise, token_id in zip(field.keys[rows], least, reference, strict=True)
    ]
    num_runners = [len(token_ids) for token_ids in runners]
    noise = gumbel(np.repeat(field.keys[rows], num_runners), np.concatenate(runners), vocab_size)
    scores = np.split(noise, np.cumsum(num_runners)[:-1])
    return [lane.winner(token_ids, own) for lane, token_ids, own in zip(lanes, runners, scores, strict=True)]


class _Lane:
    """One row's whole vocabulary, and which of its tokens pass the row's filters. Arrays are ``[vocab_size]``."""

    def __init__(
        self,
        logits: Logits,
        sampling: SamplingParams,
        temperature: np.float32,
        greatest: np.float32,
        total: float | None,
    ) -> None:
        self.logits = logits
        self._total = total
        self._temperature = temperature
        self._greatest = greatest
        self._floor = _log(sampling.min_p)
        self._top_k = sampling.top_k or _UNLIMITED
        self._top_p = sampling.top_p

    def distance(self, token_ids: Ids) -> Floats:
        """(logit - greatest logit) / T."""
        distance: Floats = (self.logits[token_ids].astype(np.float64) - self._greatest) / self._temperature
        return distance

    def winner(self, token_ids: Ids, noise: Floats) -> int:
        """The best of ``token_ids`` that passes the filters; the last one does."""
        score = self.distance(token_ids) + noise
        for token_id in token_ids[np.lexsort((token_ids, -score))].tolist():
            # The last is known to pass: no rounding here may say otherwise.
            if token_id == token_ids[-1] or self._passes(token_id):
                break
        return int(token_id)

    @cached_property
    def total(self) -> float:
        """The sum of exp(distance) over what ``min_p`` and ``top_k`` leave."""
        if self._total is not None:
            return self._total
        left = self.logits >= self._greatest + self._floor * self._temperature
        if np.count_nonzero(left) <= self._top_k:
            return float(np.add.reduce(self._weights * left))
        place = len(self.logits) - self._top_k
        least = np.partition(self.logits, place)[place]
        left = self.logits > least
        num_equal = self._top_k - np.count_nonzero(left)
        return float(np.add.reduce(self._weights * left) + num_equal * self._weights[self.logits == least][0])

    @cached_property
    def _weights(self) -> Logits:
        return weights(self.logits, self._greatest, self._temperature)

    def _passes(self, token_id: int) -> bool:
        if self._floor > -math.inf and self.distance(np.array(token_id)) < self._floor:
            return False
        if self._top_k == _UNLIMITED and self._top_p >= 1.0:
            return True
        logit = self.logits[token_id]
        before = self.logits > logit
        before[:token_id] |= self.logits[:token_id] == logit
        if self._top_k < _UNLIMITED and np.count_nonzero(before) >= self._top_k:
            return False
        return self._top_p >= 1.0 or bool(np.add.reduce(self._weights * before) < self._top_p * self.total)


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf
