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

from cluster.request import SamplingParams
from engine.candidates import Logits
from engine.history import TokenHistory
from engine.noise import Ids


@dataclass(frozen=True, slots=True)
class Edit:
    """One row's options. The rest as in :class:`engine.step.SequenceChunk`.

    ``allowed`` is what the request's grammar lets follow, bool ``[vocab_size]``; None without a grammar.
    """

    row: int
    sampling: SamplingParams
    num_generated: int
    history: TokenHistory | None
    allowed: npt.NDArray[np.bool_] | None = None
    output_token_ids: Sequence[int] = ()


def apply_edits(logits: Logits, edits: Sequence[Edit]) -> None:
    """Change the rows of ``logits`` (``[num_rows, vocab_size]``) that ``edits`` name, in place.

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


def _options(sampling: SamplingParams, vocab_size: int) -> _Options:
    named = (sampling.allowed_token_ids, sampling.banned_token_ids, sampling.stop_token_ids)
    return _prepared(sampling.logit_bias, *named, vocab_size)


@lru_cache(maxsize=128)  # an allow-list can be as long as the vocabulary; all choices of a request share an entry
def _prepared(
    logit_bias: tuple[tuple[int, float], ...],
    allowed: tuple[int, ...] | None,
    banned: tuple[int, ...],
    stops: tuple[int, ...],
    vocab_size: int,
) -> _Options:
    bias = {token_id: value for token_id, value in logit_bias if token_id < vocab_size}
    return _Options(
        bias_ids=np.array(list(bias), np.int64),
        bias=np.array(list(bias.values()), np.float32),
        allowed_ids=None if allowed is None else _known(allowed, vocab_size),
        banned_ids=_known(banned, vocab_size),
        stop_ids=_known(stops, vocab_size),
    )


def _known(token_ids: Sequence[int], vocab_size: int) -> Ids:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < vocab_size], np.int64)


def _add_bias(logits: Logits, edits: Sequence[Edit]) -> None:
    biased = [edit for edit in edits if edit.sampling.logit_bias]
    if not biased:
        return
    options = [_options(edit.sampling, logits.shape[1]) for edit in biased]
    rows = np.repeat([edit.row for edit in biased], [len(each.bias) for each in options])
    token_ids = np.concatenate([each.bias_ids for each in options])
    logits[rows, token_ids] += np.concatenate([each.bias for each in options])


def _penalise(logits: Logits, edits: Sequence[Edit]) -> None:
    penalised = [(edit, edit.history.arrays()) for edit in edits if edit.history is not None]
    if not penalised:
        return
    lengths = [len(token_ids) for _, (token_ids, _) in penalised]
    token_ids = np.concatenate([token_ids for _, (token_ids, _) in penalised])
    known = token_ids < logits.shape[1]
    token_ids = token_ids[known]
    generated = np.concatenate([counts for _, (_, counts) in penalised])[known].astype(np.float32)
    rows = np.repeat([edit.row for edit, _ in penalised], lengths)[known]
    repetition, frequency, presence = (
        np.repeat(np.array(each, np.float32), lengths)[known]
        for each in zip(*(_penalties(edit.sampling) for edit, _ in penalised), strict=True)
    )
    values = logits[rows, token_ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    logits[rows, token_ids] = values - frequency * generated - presence * (generated > 0)


def _penalties(sampling: SamplingParams) -> tuple[float, float, float]:
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty


def _ban(logits: Logits, edits: Sequence[Edit]) -> None:
    for edit in edits:
        sampling, row = edit.sampling, logits[edit.row]
        short = edit.num_generated < sampling.min_tokens
        if edit.allowed is not None:
            row[~edit.allowed] = -np.inf
            short = short and not _can_only_end(edit.allowed, sampling)
        if sampling.bad_words:
            row[_known(_endings(sampling.bad_words, edit.output_token_ids), len(row))] = -np.inf
        if sampling.allowed_token_ids is None and not sampling.banned_token_ids and not short:
            continue
        options = _options(sampling, len(row))
        if options.allowed_ids is not None:
            kept = row[options.allowed_ids]
            row.fill(-np.inf)
            row[options.allowed_ids] = kept
        row[options.banned_ids] = -np.inf
        if short:
            row[options.stop_ids] = -np.inf


def _endings(bad_words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """The last tokens of those words whose other tokens ``output`` ends with."""
    tail = tuple(output[1 - max(map(len, bad_words)) :])
    return [word[-1] for word in bad_words if tail[max(0, len(tail) - len(word) + 1) :] == word[:-1]]


def _can_only_end(allowed: npt.NDArray[np.bool_], sampling: SamplingParams) -> bool:
    """True if a grammar lets nothing follow but tokens that end the answer."""
    ends = _options(sampling, len(allowed)).stop_ids
    return int(np.count_nonzero(allowed)) == int(np.count_nonzero(allowed[ends]))
