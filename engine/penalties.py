"""What a request's options do to its logits before a token is chosen: bias, penalties, tokens that may not be.

Only the entries that an option names are touched. The semantics and their order are vLLM's (`v1/sample/sampler.py`,
`v1/sample/ops/penalties.py`) and are described at :class:`cluster.request.SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.request import SamplingParams
from engine.history import TokenHistory
from engine.noise import Ids


@dataclass(frozen=True, slots=True)
class Edit:
    """One row's options. ``num_generated`` and ``history`` as in :class:`engine.step.SequenceChunk`."""

    row: int
    sampling: SamplingParams
    num_generated: int
    history: TokenHistory | None


def apply_edits(logits: Tensor, edits: Sequence[Edit]) -> None:
    """Change the rows of ``logits`` (float32 ``[num_rows, vocab_size]``, contiguous) that ``edits`` name, in place.

    What may not be chosen becomes -inf. Token ids outside the vocabulary are left out.
    """
    _add_bias(logits, edits)
    _penalise(logits, edits)
    _ban(logits, edits)


@dataclass(frozen=True, slots=True)
class _Options:
    """The options that do not change while a request runs, as arrays. ``stop_ids`` matter for ``min_tokens``."""

    bias_ids: Ids
    bias: npt.NDArray[np.float32]
    allowed_ids: Ids | None
    banned_ids: Ids
    stop_ids: Ids


@lru_cache(maxsize=1024)
def _options(sampling: SamplingParams, vocab_size: int) -> _Options:
    bias = {token_id: value for token_id, value in sampling.logit_bias if token_id < vocab_size}
    allowed = sampling.allowed_token_ids
    return _Options(
        bias_ids=np.array(list(bias), np.int64),
        bias=np.array(list(bias.values()), np.float32),
        allowed_ids=None if allowed is None else _known(allowed, vocab_size),
        banned_ids=_known(sampling.banned_token_ids, vocab_size),
        stop_ids=_known(sampling.stop_token_ids, vocab_size),
    )


def _known(token_ids: Sequence[int], vocab_size: int) -> Ids:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < vocab_size], np.int64)


def _add_bias(logits: Tensor, edits: Sequence[Edit]) -> None:
    biased = [edit for edit in edits if edit.sampling.logit_bias]
    if not biased:
        return
    options = [_options(edit.sampling, logits.shape[1]) for edit in biased]
    places = _places(logits, [(edit.row, each.bias_ids) for edit, each in zip(biased, options, strict=True)])
    flat = logits.view(-1)
    flat[places] = flat[places] + _tensor(np.concatenate([each.bias for each in options]), logits)


def _penalise(logits: Tensor, edits: Sequence[Edit]) -> None:
    vocab_size = logits.shape[1]
    ids, counts, factors = [], [], []
    for edit in edits:
        if edit.history is not None:
            sampling = edit.sampling
            token_ids, generated_counts = edit.history.arrays()
            known = token_ids < vocab_size
            ids.append((edit.row, token_ids[known]))
            counts.append(generated_counts[known])
            factor = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            factors.append(np.tile(np.array(factor, np.float32), (len(counts[-1]), 1)))
    if not ids:
        return
    repetition, frequency, presence = _tensor(np.concatenate(factors), logits).unbind(dim=1)
    generated = _tensor(np.concatenate(counts), logits)
    places, flat = _places(logits, ids), logits.view(-1)
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * generated.to(torch.float32)
    flat[places] = values - presence * (generated > 0).to(torch.float32)


def _ban(logits: Tensor, edits: Sequence[Edit]) -> None:
    banned = []
    for edit in edits:
        sampling = edit.sampling
        short = edit.num_generated < sampling.min_tokens
        if sampling.allowed_token_ids is None and not sampling.banned_token_ids and not short:
            continue
        options = _options(sampling, logits.shape[1])
        if options.allowed_ids is not None:
            row, allowed = logits[edit.row], _tensor(options.allowed_ids, logits)
            kept = row[allowed]
            row.fill_(-torch.inf)
            row[allowed] = kept
        banned.append((edit.row, options.banned_ids))
        if short:
            banned.append((edit.row, options.stop_ids))
    if banned:
        logits.view(-1)[_places(logits, banned)] = -torch.inf


def _places(logits: Tensor, ids: Sequence[tuple[int, Ids]]) -> Tensor:
    """Indexes into the flattened ``logits`` of token ids of rows."""
    return _tensor(np.concatenate([row * logits.shape[1] + token_ids for row, token_ids in ids]), logits)


def _tensor(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
