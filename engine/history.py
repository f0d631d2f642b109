"""What a request's penalties must know of its sequence: sparse, and O(1) for each further token."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cluster.request import SamplingParams
from cluster.wire import PenaltyCounts


class TokenHistory:
    """The distinct tokens of one sequence, and how often each was generated (0: only in the prompt).

    Owned by a node's state. A step in flight reads it on another thread, so it is appended to between steps only.
    """

    __slots__ = ("_counts", "_places", "_token_ids")

    def __init__(self, prompt_token_ids: Iterable[int], output_counts: Mapping[int, int]) -> None:
        self._places: dict[int, int] = {}
        self._token_ids = array("q")
        self._counts = array("q")
        for token_id in prompt_token_ids:
            self._add(token_id, 0)
        for token_id, count in output_counts.items():
            self._add(token_id, count)

    @classmethod
    def of_sequence(cls, sampling: SamplingParams, token_ids: Sequence[int], num_generated: int) -> TokenHistory | None:
        """The history of a sequence whose last ``num_generated`` tokens are output; None if no penalty is on."""
        if not sampling.penalised:
            return None
        num_prompt = len(token_ids) - num_generated
        prompt = token_ids[:num_prompt] if sampling.repetition_penalty != 1.0 else ()
        return cls(prompt, Counter(token_ids[num_prompt:]))

    @classmethod
    def of_counts(cls, counts: PenaltyCounts | None) -> TokenHistory | None:
        """The history that another node's :meth:`counts` describe."""
        return None if counts is None else cls(counts.prompt_token_ids, dict(counts.output_counts))

    def append(self, token_id: int) -> None:
        """``token_id`` was generated."""
        self._add(token_id, 1)

    def counts(self) -> PenaltyCounts:
        """In the form that crosses the wire."""
        pairs = list(zip(self._token_ids, self._counts, strict=True))
        return PenaltyCounts(
            prompt_token_ids=tuple(token_id for token_id, count in pairs if not count),
            output_counts=tuple((token_id, count) for token_id, count in pairs if count),
        )

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(distinct token ids, how often each was generated), as copies."""
        return np.array(self._token_ids), np.array(self._counts)

    def _add(self, token_id: int, count: int) -> None:
        place = self._places.setdefault(token_id, len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.append(token_id)
            self._counts.append(count)
        else:
            self._counts[place] += count
