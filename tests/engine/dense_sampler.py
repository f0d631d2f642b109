"""The sampler's specification, slow and obvious: one row, every token, a full sort."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.request import SamplingParams
from engine.noise import gumbel, row_key

Row = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Before:
    """What was before the token to be chosen."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    @property
    def all_ids(self) -> list[int]:
        return [*self.prompt, *self.output]


def edited(logits: npt.NDArray[np.float32], sampling: SamplingParams, before: Before) -> Row:
    """The logits after bias, penalties and bans, in float32 as the sampler has them."""
    row = list(logits)
    for token_id, bias in dict(sampling.logit_bias).items():
        if token_id < len(row):
            row[token_id] += np.float32(bias)
    counts = Counter(before.output)
    repetition, frequency, presence = (
        np.float32(each)
        for each in (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    )
    for token_id in {*before.prompt, *before.output}:
        if row[token_id] > 0:
            row[token_id] /= repetition
        else:
            row[token_id] *= repetition
        row[token_id] -= frequency * np.float32(counts[token_id])
        row[token_id] -= presence if counts[token_id] else np.float32(0)
    for token_id in range(len(row)):
        allowed = sampling.allowed_token_ids is None or token_id in sampling.allowed_token_ids
        too_early = len(before.output) < sampling.min_tokens and token_id in sampling.stop_token_ids
        completes = any(
            word[-1] == token_id and list(before.output)[-len(word) + 1 :] == list(word[:-1])
            for word in sampling.bad_words
        )
        if not allowed or too_early or completes or token_id in sampling.banned_token_ids:
            row[token_id] = np.float32(-math.inf)
    return np.array(row, np.float64)


def kept(row: Row, sampling: SamplingParams) -> tuple[list[int], Row, float]:
    """(tokens that pass the filters, likeliest first, equals by id; their probabilities; how clear-cut that is).

    The last is the least relative distance of any decision from going the other way.
    """
    distance = (row - row.max()) / sampling.temperature
    order = np.lexsort((np.arange(len(row)), -row))
    left = order[np.isfinite(row[order])]
    margin = math.inf
    if sampling.min_p:
        parts = np.exp(distance[left])
        margin = min(margin, float(np.abs(parts - sampling.min_p).min()))
        left = left[parts >= sampling.min_p]
    if sampling.top_k:
        left = left[: sampling.top_k]
    weights = np.exp(distance[left])
    if sampling.top_p < 1.0:
        before = (np.cumsum(weights) - weights) / weights.sum()
        margin = min(margin, float(np.abs(before - sampling.top_p).min()))
        num_kept = max(1, int((before < sampling.top_p).sum()))
        left, weights = left[:num_kept], weights[:num_kept]
    return left.tolist(), weights / weights.sum(), margin


def choose_densely(
    logits: npt.NDArray[np.float32], sampling: SamplingParams, before: Before, position: int
) -> tuple[int | None, float]:
    """(the token or None if nothing is left, how clear-cut the choice is as in :func:`kept`)."""
    row = edited(logits, sampling, before)
    if not np.isfinite(row).any():
        return None, math.inf
    if sampling.greedy:
        best = np.sort(row)[::-1]
        clear = float(best[0] - best[1]) if len(best) > 1 and best[0] > best[1] else math.inf
        return int(row.argmax()), clear
    token_ids, _, margin = kept(row, sampling)
    key = np.array([row_key(sampling.seed, sampling.choice, position)], np.uint64)
    ids = np.array(token_ids)
    score = (row[ids] - row.max()) / sampling.temperature + gumbel(key, ids, len(row))
    ranked = np.sort(score)[::-1]
    margin = min(margin, float(ranked[0] - ranked[1])) if len(ranked) > 1 else margin
    return int(ids[score.argmax()]), margin
