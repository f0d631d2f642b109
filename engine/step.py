"""What a scheduler asks of the runner in one step, and what comes back. Pure: no torch, no clock.

The runner owns nothing named here: blocks in a block table stay the scheduler's, before, during and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.request import RequestKey, SamplingParams, TokenLogprobs
from engine.history import TokenHistory


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Compute one sequence's tokens at positions ``start .. start + len(token_ids) - 1``.

    Keys and values of all earlier positions are in the cache already, through the same ``block_table``: entry
    ``i`` is the block of positions ``i * block_size`` and on, and the table covers at least this chunk.
    ``sampling`` is set if and only if a token is to be sampled after the last one, for each of its choices; that
    token's index in the sequence is ``position`` (always ``start + len(token_ids)``), which with the seed and the
    choice determines its noise.
    ``num_generated`` of the tokens before it are output, not prompt. ``history`` is set if ``sampling`` has penalties:
    the whole sequence up to the token to be sampled. ``output_token_ids`` are the output so far, given if ``sampling``
    reads it. The runner reads both during the step, they stay the scheduler's.
    ``targets`` are the tokens that really follow the first so many of ``token_ids``: their log-probabilities are
    wanted, and those of the ``num_target_logprobs`` most likely tokens at each place.
    """

    key: RequestKey
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None
    position: int
    num_generated: int = 0
    history: TokenHistory | None = None
    output_token_ids: Sequence[int] = ()
    targets: Sequence[int] = ()
    num_target_logprobs: int = 0

    def __post_init__(self) -> None:
        if not self.token_ids or self.start < 0 or self.position != self.start + len(self.token_ids):
            raise ValueError(
                f"{self.key}: chunk of {len(self.token_ids)} tokens at {self.start} cannot end at {self.position}"
            )
        if len(self.targets) > len(self.token_ids):
            raise ValueError(f"{self.key}: {len(self.targets)} targets for {len(self.token_ids)} tokens")


class BlockCopy(NamedTuple):
    """Give ``target`` the contents of ``source``."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's chunks, prefill and decode mixed in any order; each sequence and each block at most once.

    Blocks may be shared by several block tables only below every sharer's ``start``. ``copies`` are made before any
    chunk is computed: a source may be written in the same step, a target is named once and is nobody's source.
    """

    chunks: tuple[SequenceChunk, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One choice's token at the chunk's ``position``; ``logprobs`` if its request asked for them."""

    key: RequestKey
    token_id: int
    logprobs: TokenLogprobs | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """One entry for each of a chunk's ``targets``, in order."""

    key: RequestKey
    logprobs: tuple[TokenLogprobs, ...]


class FailedSequence(NamedTuple):
    """A sequence of this request cannot go on; its blocks hold nothing of use. A client may see ``message``."""

    key: RequestKey
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens, failures and scores in the order of the plan's chunks and of their choices.

    Chunks that sample nothing leave no token, those without targets no score.
    ``seconds`` is the wall time of the step.
    """

    tokens: tuple[SampledToken, ...]
    failed: tuple[FailedSequence, ...]
    seconds: float
    scored: tuple[ScoredTokens, ...] = ()
