"""Executes step plans: plan to tensors, one forward pass, one token for each chunk that samples."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from cluster.request import RequestId, RequestKey, SamplingParams
from engine.kv_cache import KVCache
from engine.model import ForwardBatch, LlamaModel
from engine.sampler import sample
from engine.step import FailedSequence, SampledToken, SequenceChunk, StepPlan, StepResult
from kernels.reference import attention_span


class ModelRunner:
    """One model on one cache. Not thread-safe: one step at a time."""

    def __init__(self, model: LlamaModel, cache: KVCache) -> None:
        """Raises ValueError if the cache is not laid out for the model."""
        expected = model.config.kv_layout(cache.layout.block_size, model.weights.dtype)
        if cache.layout != expected:
            raise ValueError(f"cache layout {cache.layout} does not fit the model's {expected}")
        self.model = model
        self.cache = cache

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. What is wrong with one sequence fails that sequence only.

        That is a chunk outside the vocabulary, the model's positions, its block table or the pool, and logits
        that are not finite. Any other exception is a bug or a lack of memory and concerns the whole step.
        """
        began = time.perf_counter()
        problems = [self._problem(chunk) for chunk in plan.chunks]
        chunks = [chunk for chunk, problem in zip(plan.chunks, problems, strict=True) if problem is None]
        outcomes: dict[RequestKey, int | str] = {
            chunk.key: problem for chunk, problem in zip(plan.chunks, problems, strict=True) if problem
        }
        if chunks:
            logits = self.model.forward(self._batch(chunks), self.cache.pool)
            outcomes |= _choose(logits, [chunk for chunk in chunks if chunk.sampling is not None])
        tokens: list[SampledToken] = []
        failed: list[FailedSequence] = []
        for chunk in plan.chunks:
            outcome = outcomes.get(chunk.key)
            if isinstance(outcome, int):
                tokens.append(SampledToken(chunk.key, outcome))
            elif outcome is not None:
                failed.append(FailedSequence(chunk.key, outcome))
        return StepResult(tuple(tokens), tuple(failed), time.perf_counter() - began)

    def warm_up(self, num_tokens: int = 256) -> float:
        """Run a prefill of up to ``num_tokens`` and a decode step, so that the first request does not pay for
        first use; returns seconds taken.

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

    def _problem(self, chunk: SequenceChunk) -> str | None:
        config, block_size = self.model.config, self.cache.layout.block_size
        if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= config.vocab_size:
            return f"a token id is outside the model's vocabulary of {config.vocab_size}"
        if chunk.position > config.max_positions:
            return f"{chunk.position} tokens are over the model's {config.max_positions} positions"
        num_blocks = -(-chunk.position // block_size)
        used = chunk.block_table[:num_blocks]
        if len(used) < num_blocks or min(used) < 0 or max(used) >= self.cache.num_blocks:
            return "internal: the block table does not cover the tokens to compute"
        return None

    def _batch(self, chunks: Sequence[SequenceChunk]) -> ForwardBatch:
        block_size = self.cache.layout.block_size
        token_ids: list[int] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        spans = []
        sample_rows: list[int] = []
        for chunk in chunks:
            first_row, count = len(token_ids), len(chunk.token_ids)
            token_ids.extend(chunk.token_ids)
            own = np.arange(chunk.start, chunk.position)
            table = np.array(chunk.block_table[: -(-chunk.position // block_size)], dtype=np.int64)
            positions.append(own)
            slots.append(table[own // block_size] * block_size + own % block_size)
            spans.append(attention_span(first_row, count, chunk.position, torch.from_numpy(table)))
            if chunk.sampling is not None:
                sample_rows.append(len(token_ids) - 1)
        return ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.from_numpy(np.concatenate(positions)),
            slots=torch.from_numpy(np.concatenate(slots)),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
            spans=tuple(spans),
        )


def _choose(logits: torch.Tensor, chunks: Sequence[SequenceChunk]) -> dict[RequestKey, int | str]:
    """Sample a token for each row, or say why not. ``logits``: ``[len(chunks), vocab_size]``."""
    # A sum is finite exactly if all of its terms are: float32 holds the sum of any sane logits.
    finite = logits.sum(dim=-1).isfinite().tolist()
    rows = [row for row, good in enumerate(finite) if good]
    kept = [(chunks[row], chunks[row].sampling) for row in rows]
    token_ids = sample(
        logits if len(rows) == len(chunks) else logits[rows],
        [sampling for _, sampling in kept if sampling is not None],
        [chunk.position for chunk, _ in kept],
    )
    outcomes: dict[RequestKey, int | str] = {chunk.key: "the model's output is not finite" for chunk in chunks}
    outcomes.update({chunk.key: token for (chunk, _), token in zip(kept, token_ids, strict=True)})
    return outcomes
