"""Steps of a real model at a given batch and context, with what they must read and compute at least."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.request import RequestId, RequestKey, SamplingParams
from engine.kv_cache import KVCache
from engine.model import LlamaModel
from engine.model_config import Dtype, ModelConfig
from engine.runner import ModelRunner
from engine.step import SequenceChunk, StepPlan
from engine.weights import load_weights
from kernels.backend import Backend

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1)
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Work:
    """The least a step reads and computes. ``flops`` counts multiplications and additions."""

    weight_bytes: float
    flops: float
    kv_bytes: float


class Steps:
    """A model over a cache whose blocks hold noise: untouched memory would be one page, read from L1."""

    def __init__(self, directory: Path, ops: Backend, dtype: Dtype, num_tokens: int) -> None:
        """``num_tokens``: the most that all sequences of a step hold together."""
        self.config = ModelConfig.from_directory(directory)
        self.dtype = dtype
        self.model = LlamaModel(self.config, load_weights(directory, self.config, ops, dtype))
        self.cache = KVCache(self.model.kv_layout(BLOCK_SIZE), -(-num_tokens // BLOCK_SIZE) + 1)
        self.runner = ModelRunner(self.model, self.cache)
        for block in self.cache.pool:
            block.normal_(0, 0.1)

    def decode(self, batch: int, context: int) -> StepPlan:
        """``batch`` sequences at ``context`` tokens, the last being computed, over random blocks."""
        tables = self._tables(batch, context)
        return StepPlan(tuple(self._chunk(index, 1, context, table) for index, table in enumerate(tables)))

    def prefill(self, length: int) -> StepPlan:
        """One whole prompt."""
        return StepPlan((self._chunk(0, length, length, self._tables(1, length)[0]),))

    def _tables(self, batch: int, context: int) -> list[list[int]]:
        each = -(-context // BLOCK_SIZE)
        blocks = random.Random(0).sample(range(self.cache.num_blocks), batch * each)
        return [blocks[i * each : (i + 1) * each] for i in range(batch)]

    def _chunk(self, index: int, count: int, context: int, table: list[int]) -> SequenceChunk:
        token_ids = torch.randint(3, self.config.vocab_size, (count,)).tolist()
        key = RequestKey(RequestId(f"bench-{index}"), 0)
        return SequenceChunk(key, token_ids, context - count, table, GREEDY, context)

    def decode_work(self, batch: int, context: int) -> Work:
        """All weights once; two operations a weight and row; keys and values of every context once."""
        weights = self.layer_parameters + self.head_parameters
        kv_bytes = batch * context * self.cache.layout.token_bytes
        return Work(weights * _WEIGHT_BYTES[self.dtype], 2.0 * weights * batch, kv_bytes)

    def prefill_work(self, length: int) -> Work:
        """The layers for every row, causal attention, the vocabulary for one row."""
        config = self.config
        attention = 2.0 * length**2 * config.num_heads * config.head_dim * config.num_layers
        weights = self.layer_parameters + self.head_parameters
        flops = 2.0 * self.layer_parameters * length + attention + 2.0 * self.head_parameters
        return Work(weights * _WEIGHT_BYTES[self.dtype], flops, 0.0)

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' linears."""
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = 2 * queries + 2 * keys + 3 * config.intermediate_size
        return config.num_layers * config.hidden_size * rows

    @property
    def head_parameters(self) -> int:
        """Weights of the vocabulary projection."""
        return self.config.hidden_size * self.config.vocab_size
