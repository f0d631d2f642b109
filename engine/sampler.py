"""Chooses tokens from logits. Stateless, and every row by itself.

What a row gets depends on its logits, its options, its position and (with penalties) its history: not on its batch
mates, their order or number, the node or the number of threads (:mod:`engine.noise`). Rows that are merely greedy
cost an argmax, whatever others in the batch ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cluster.request import SamplingParams, TokenLogprobs
from engine.candidates import Logits
from engine.history import TokenHistory
from engine.logprobs import token_logprobs
from engine.penalties import Edit, apply_edits
from engine.race import ExpSums, race
from kernels.host import exp_sums

NOT_FINITE = "the model's output is not finite"
NOTHING_LEFT = "the request's options leave no token to choose"
NO_HISTORY = "internal: penalties without the sequence's history"


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row asks for. ``position`` is the index in its sequence of the token to be chosen, ``allowed`` what its
    grammar lets follow (bool ``[vocab_size]``, None without one); the rest as in :class:`engine.step.SequenceChunk`.
    """

    sampling: SamplingParams
    position: int
    num_generated: int = 0
    history: TokenHistory | None = None
    allowed: npt.NDArray[np.bool_] | None = None
    output_token_ids: Sequence[int] = ()


class Choice(NamedTuple):
    """The token of one row; ``logprobs`` if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


def choose(logits: Tensor, draws: Sequence[Draw], sums: ExpSums = exp_sums) -> list[Choice | str]:
    """A token for each row, or why that row has none. ``logits``: float32 ``[len(draws), vocab_size]``, unchanged;
    ``sums``: what sums whole rows of them, a backend's :meth:`kernels.backend.Backend.exp_sums`.

    A row fails alone: if its logits are not finite, its options leave no token, or its history is missing. Greedy
    rows take the lowest of equals. Logits on another device than the CPU are copied from there first.
    """
    if not draws:
        return []
    values: Logits = logits.detach().cpu().numpy()
    problems = _problems(values, draws)
    plain: list[int] = []
    special: list[int] = []
    for row, draw in enumerate(draws):
        if row not in problems:
            edited = draw.sampling.edits_logits(draw.num_generated)
            (plain if draw.sampling.greedy and not edited else special).append(row)
    token_ids: dict[int, int | None] = {}
    if plain:
        token_ids.update(zip(plain, _rows(values, plain).argmax(axis=1).tolist(), strict=True))
    if special:
        token_ids.update(zip(special, _choose_special(values, special, draws, sums), strict=True))
    logprobs = _logprobs(values, draws, token_ids)
    outcomes: list[Choice | str] = []
    for row in range(len(draws)):
        token_id = token_ids.get(row)
        outcomes.append(problems.get(row, NOTHING_LEFT) if token_id is None else Choice(token_id, logprobs.get(row)))
    return outcomes


def sample(
    logits: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int], sums: ExpSums = exp_sums
) -> list[int]:
    """The token ids of :func:`choose`, for rows that cannot fail. Raises ValueError if one does."""
    outcomes = choose(logits, [Draw(*draw) for draw in zip(sampling, positions, strict=True)], sums)
    if failed := [outcome for outcome in outcomes if isinstance(outcome, str)]:
        raise ValueError(failed[0])
    return [outcome.token_id for outcome in outcomes if isinstance(outcome, Choice)]


def _problems(logits: Logits, draws: Sequence[Draw]) -> dict[int, str]:
    # A sum is finite exactly if all of its terms are: float32 holds the sum of any sane logits.
    with np.errstate(all="ignore"):
        finite = np.isfinite(logits.sum(axis=1)).tolist()
    problems = {row: NOT_FINITE for row, good in enumerate(finite) if not good}
    for row, draw in enumerate(draws):
        if draw.history is None and draw.sampling.penalised:
            problems.setdefault(row, NO_HISTORY)
    return problems


def _choose_special(logits: Logits, rows: Sequence[int], draws: Sequence[Draw], sums: ExpSums) -> list[int | None]:
    """Tokens of rows that sample or have options; None for a row whose options leave nothing."""
    edits = [
        Edit(index, draw.sampling, draw.num_generated, draw.history, draw.allowed, draw.output_token_ids)
        for index, draw in ((index, draws[row]) for index, row in enumerate(rows))
        if draw.sampling.edits_logits(draw.num_generated)
    ]
    work = _rows(logits, rows)
    if edits:
        work = work.copy() if work is logits else work
        apply_edits(work, edits)
    greedy = [index for index, row in enumerate(rows) if draws[row].sampling.greedy]
    random = [index for index, row in enumerate(rows) if not draws[row].sampling.greedy]
    chosen: dict[int, int | None] = {}
    if greedy:
        for index, token_id in zip(greedy, _rows(work, greedy).argmax(axis=1).tolist(), strict=True):
            chosen[index] = token_id if work[index, token_id] > -np.inf else None
    if random:
        asked = [draws[rows[index]] for index in random]
        winners = race(_rows(work, random), [draw.sampling for draw in asked], [draw.position for draw in asked], sums)
        chosen.update(zip(random, winners, strict=True))
    return [chosen[index] for index in range(len(rows))]


def _logprobs(logits: Logits, draws: Sequence[Draw], token_ids: dict[int, int | None]) -> dict[int, TokenLogprobs]:
    rows, chosen, counts = [], [], []
    for row, draw in enumerate(draws):
        if draw.sampling.num_logprobs is not None and (token_id := token_ids.get(row)) is not None:
            rows.append(row)
            chosen.append(token_id)
            counts.append(draw.sampling.num_logprobs)
    if not rows:
        return {}
    return dict(zip(rows, token_logprobs(_rows(logits, rows), chosen, counts), strict=True))


def _rows(logits: Logits, rows: Sequence[int]) -> Logits:
    """These rows, without a copy if they are all (``rows`` ascend)."""
    return logits if len(rows) == len(logits) else logits[rows]
