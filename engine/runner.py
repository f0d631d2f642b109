"""Executes step plans: plan to tensors, one forward pass, one token for each chunk that samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
import torch

from cluster.request import RequestId, RequestKey, SamplingParams, TokenLogprobs
from engine.grammar import Allowed, GrammarError, Grammars
from engine.kv_cache import KVCache
from engine.logprobs import token_logprobs
from engine.model import ForwardBatch, LlamaModel
from engine.sampler import NOT_FINITE, Choice, Draw, choose
from engine.step import FailedSequence, SampledToken, ScoredTokens, SequenceChunk, StepPlan, StepResult
from kernels.spans import Spans

# Prompt tokens that are scored at once: their logits are the memory this takes (6 MB for 49,152 tokens).
_SCORED_ROWS = 32


class ModelRunner:
    """One model on one cache. Not thread-safe: one step at a time."""

    def __init__(self, model: LlamaModel, cache: KVCache, grammars: Grammars | None = None) -> None:
        """Raises ValueError if the cache is not laid out for the model. Without ``grammars`` requests with a grammar
        fail.
        """
        expected = model.kv_layout(cache.layout.block_size)
        if cache.layout != expected:
            raise ValueError(f"cache layout {cache.layout} does not fit the model's {expected}")
        self.model = model
        self.cache = cache
        self._grammars = grammars

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. What is wrong with one sequence fails that sequence only.

        That is a chunk outside the vocabulary, the model's positions, its block table or the pool, logits that
        are not finite, and options that leave no token. Any other exception is a bug or a lack of memory and concerns
        the whole step.
        """
        began = time.perf_counter()
        problems = [self._problem(chunk) for chunk in plan.chunks]
        chunks = [chunk for chunk, problem in zip(plan.chunks, problems, strict=True) if problem is None]
        self.cache.copy_blocks(plan.copies)
        drawn: Iterator[list[Choice | str]] = iter(())
        if chunks:
            logits = self.model.forward(self._batch(chunks), self.cache.pool)
            drawn = iter(self._choose(logits, [chunk for chunk in chunks if chunk.sampling is not None]))
        tokens: list[SampledToken] = []
        failed: list[FailedSequence] = []
        for chunk, problem in zip(plan.chunks, problems, strict=True):
            if problem is not None:
                failed.append(FailedSequence(chunk.key, problem))
            elif chunk.sampling is not None:
                for choice, outcome in enumerate(next(drawn), chunk.sampling.choice):
                    if isinstance(outcome, Choice):
                        tokens.append(SampledToken(chunk.key, outcome.token_id, outcome.logprobs, choice))
                    else:
                        failed.append(FailedSequence(chunk.key, outcome))
        scored, unscored = self._score_all(chunks)
        return StepResult(tuple(tokens), (*failed, *unscored), time.perf_counter() - began, scored)

    def warm_up(self, num_tokens: int = 32) -> float:
        """Run a prefill of up to ``num_tokens`` and a decode step, so that the first request does not pay for
        first use (of threads, code and graphs: a short prompt does); returns seconds taken.

        Call before any block is in use: the first blocks are written, then cleared.
        """
        block_size = self.cache.layout.block_size
        length = min(num_tokens, self.cache.num_blocks * block_size, self.model.config.max_positions) - 1
        num_blocks = -(-(length + 1) // block_size)
        key = RequestKey(RequestId("warm-up"), 0)
        greedy = SamplingParams(max_tokens=1)
        table = range(num_blocks)
        seconds = 0.0
        for start, count in ((0, length), (length, 1)):
            if count:
                chunk = SequenceChunk(key, [0] * count, start, table, greedy, start + count)
                seconds += self.execute(StepPlan((chunk,))).seconds
        self.cache.pool[:num_blocks].zero_()
        return seconds

    def _score_all(
        self, chunks: Sequence[SequenceChunk]
    ) -> tuple[tuple[ScoredTokens, ...], tuple[FailedSequence, ...]]:
        scored: list[ScoredTokens] = []
        failed: list[FailedSequence] = []
        first_row = 0
        for chunk in chunks:
            if chunk.targets:
                if (logprobs := self._score(chunk, first_row)) is None:
                    failed.append(FailedSequence(chunk.key, NOT_FINITE))
                else:
                    scored.append(ScoredTokens(chunk.key, logprobs))
            first_row += len(chunk.token_ids)
        return tuple(scored), tuple(failed)

    def _score(self, chunk: SequenceChunk, first_row: int) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the chunk's targets, after the step that computed it; None if they are not finite."""
        found: list[TokenLogprobs] = []
        for start in range(0, len(chunk.targets), _SCORED_ROWS):
            targets = chunk.targets[start : start + _SCORED_ROWS]
            rows = range(first_row + start, first_row + start + len(targets))
            logits = self.model.logits(rows).numpy()
            with np.errstate(all="ignore"):
                if not np.isfinite(logits.sum(axis=1)).all():
                    return None
            found += token_logprobs(logits, targets, [chunk.num_target_logprobs] * len(targets), ranked=True)
        return tuple(found)

    def _problem(self, chunk: SequenceChunk) -> str | None:
        config, block_size = self.model.config, self.cache.layout.block_size
        lowest, highest = min(chunk.token_ids), max(chunk.token_ids)
        if chunk.targets:
            lowest, highest = min(lowest, *chunk.targets), max(highest, *chunk.targets)
        if lowest < 0 or highest >= config.vocab_size:
            return f"a token id is outside the model's vocabulary of {config.vocab_size}"
        if chunk.position > config.max_positions:
            return f"{chunk.position} tokens are over the model's {config.max_positions} positions"
        num_blocks = -(-chunk.position // block_size)
        used = chunk.block_table[:num_blocks]
        if len(used) < num_blocks or min(used) < 0 or max(used) >= self.cache.num_blocks:
            return "internal: the block table does not cover the tokens to compute"
        return None

    def _batch(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        block_size, count = self.cache.layout.block_size, len(chunks)
        num_rows = np.fromiter((len(chunk.token_ids) for chunk in chunks), np.int32, count)
        context_lens = np.fromiter((chunk.position for chunk in chunks), np.int32, count)
        num_blocks = -(-context_lens // block_size)
        table_starts = np.concatenate(([0], np.cumsum(num_blocks)))
        tables = (chunk.block_table[:used] for chunk, used in zip(chunks, num_blocks.tolist(), strict=True))
        block_ids = np.fromiter(chain.from_iterable(tables), np.int64, int(table_starts[-1]))
        ends = np.cumsum(num_rows)
        first_rows = ends - num_rows
        # Row r of the batch is position r + shift of its sequence.
        shift = np.repeat(context_lens - ends, num_rows)
        positions = np.arange(len(shift)) + shift
        blocks = block_ids[np.repeat(table_starts[:-1], num_rows) + positions // block_size]
        sampled = np.fromiter((chunk.sampling is not None for chunk in chunks), np.bool_, count)
        return ForwardBatch(
            token_ids=torch.from_numpy(
                np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, len(positions))
            ),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * block_size + positions % block_size),
            sample_rows=torch.from_numpy((ends - 1)[sampled].astype(np.int64)),
            spans=Spans(
                first_rows.astype(np.int32),
                num_rows,
                context_lens,
                table_starts.astype(np.int32),
                block_ids.astype(np.int32),
            ),
        )

    def _choose(self, logits: torch.Tensor, chunks: Sequence[SequenceChunk]) -> list[list[Choice | str]]:
        """For each row, a token for each of its choices, or why not. ``logits``: ``[len(chunks), vocab_size]``."""
        draws: list[list[Draw]] = []
        problems: list[str | None] = []
        for chunk in chunks:
            if chunk.sampling is not None:
                allowed, problem = self._allowed(chunk, chunk.sampling)
                problems.append(problem)
                # Greedy choices are all the same: one draw will do.
                wanted = (chunk.sampling,) if chunk.sampling.greedy else chunk.sampling.choices()
                rest = (chunk.position, chunk.num_generated, chunk.history, allowed, chunk.output_token_ids)
                draws.append([Draw(each, *rest) for each in wanted])
        counts = [len(each) for each in draws]
        if max(counts, default=1) > 1:
            logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
        outcomes = iter(choose(logits, list(chain.from_iterable(draws)), self.model.weights.ops.exp_sums))
        found: list[list[Choice | str]] = []
        for chunk, count, problem in zip(chunks, counts, problems, strict=True):
            drawn = [outcome if problem is None else problem for outcome in islice(outcomes, count)]
            if chunk.sampling is not None and chunk.sampling.greedy:
                drawn *= chunk.sampling.num_choices
            found.append(drawn)
        return found

    def _allowed(self, chunk: SequenceChunk, sampling: SamplingParams) -> tuple[Allowed | None, str | None]:
        """What the sequence's grammar lets follow (None: anything), or why that cannot be said."""
        if sampling.grammar is None:
            return None, None
        if self._grammars is None:
            return None, "this node follows no grammars"
        try:
            return self._grammars.allowed(chunk.key, sampling.choice, sampling.grammar, chunk.output_token_ids), None
        except GrammarError as error:
            return None, str(error)
