"""Runs token sequences through a runner the way schedulers do: chunked, mixed, over random physical blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cluster.request import RequestId, RequestKey, SamplingParams
from engine.history import TokenHistory
from engine.model import ForwardBatch
from engine.runner import ModelRunner
from engine.step import SequenceChunk, StepPlan
from kernels.spans import Spans


@dataclass
class Running:
    """One request as the bench's little scheduler sees it."""

    key: RequestKey
    token_ids: list[int]
    num_prompt: int
    block_table: list[int]
    sampling: SamplingParams
    num_computed: int = 0
    finished: bool = False

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass
class Bench:
    """Continuous batching with chunked prefill over random physical blocks, for tests only."""

    runner: ModelRunner
    rng: random.Random
    eos_id: int | None = None
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.runner.cache.num_blocks))
        self.rng.shuffle(self.free)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], budget: int
    ) -> list[list[int]]:
        """Generated ids of each prompt, at most ``budget`` tokens a step, decodes before prefills."""
        sequences = [self._admit(index, prompts[index], sampling[index]) for index in range(len(prompts))]
        while live := [sequence for sequence in sequences if not sequence.finished]:
            result = self.runner.execute(StepPlan(tuple(self._chunks(live, budget))))
            assert not result.failed
            by_key = {sequence.key: sequence for sequence in sequences}
            for token in result.tokens:
                self._extend(by_key[token.key], token.token_id)
        return [sequence.token_ids[sequence.num_prompt :] for sequence in sequences]

    def _admit(self, index: int, prompt: Sequence[int], sampling: SamplingParams) -> Running:
        num_blocks = -(-(len(prompt) + sampling.max_tokens) // self.runner.cache.layout.block_size)
        table = [self.free.pop() for _ in range(num_blocks)]
        return Running(RequestKey(RequestId(f"r{index}"), 0), list(prompt), len(prompt), table, sampling)

    def _chunks(self, live: list[Running], budget: int) -> list[SequenceChunk]:
        chunks = []
        for sequence in sorted(live, key=lambda one: one.num_missing > 1):
            count = min(sequence.num_missing, budget)
            if count == 0:
                break
            budget -= count
            start = sequence.num_computed
            sequence.num_computed += count
            chunks.append(
                SequenceChunk(
                    key=sequence.key,
                    token_ids=sequence.token_ids[start : start + count],
                    start=start,
                    block_table=sequence.block_table,
                    sampling=sequence.sampling if sequence.num_missing == 0 else None,
                    position=start + count,
                    num_generated=len(sequence.token_ids) - sequence.num_prompt,
                    history=self._history(sequence),
                )
            )
        self.rng.shuffle(chunks)
        return chunks

    def _history(self, sequence: Running) -> TokenHistory | None:
        num_generated = len(sequence.token_ids) - sequence.num_prompt
        return TokenHistory.of_sequence(sequence.sampling, sequence.token_ids, num_generated)

    def _extend(self, sequence: Running, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        num_generated = len(sequence.token_ids) - sequence.num_prompt
        sequence.finished = token_id == self.eos_id or num_generated == sequence.sampling.max_tokens
        if sequence.finished:
            self.free.extend(sequence.block_table)


def all_logits(runner: ModelRunner, token_ids: Sequence[int], chunk_len: int, rng: random.Random) -> torch.Tensor:
    """Logits after every token of one sequence, computed ``chunk_len`` tokens at a time in random blocks."""
    block_size = runner.cache.layout.block_size
    blocks = rng.sample(range(runner.cache.num_blocks), -(-len(token_ids) // block_size))
    rows = []
    for start in range(0, len(token_ids), chunk_len):
        end = min(start + chunk_len, len(token_ids))
        positions = torch.arange(start, end)
        table = torch.tensor(blocks[: -(-end // block_size)])
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids[start:end]),
            positions=positions,
            slots=table[positions // block_size] * block_size + positions % block_size,
            sample_rows=positions - start,
            spans=Spans.single(end - start, end, table.numpy()),
        )
        rows.append(runner.model.forward(batch, runner.cache.pool).clone())
    return torch.cat(rows)
