"""One Llama-family decoder, driven by its configuration, over a paged KV pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_config import ModelConfig, RopeConfig
from engine.weights import ModelWeights
from kernels.decoder import DecoderStep
from kernels.reference import rope_tables
from kernels.spans import Spans
from kernels.upload import upload
from kvtransfer.layout import BlockLayout

_FIRST_ROWS = 64  # buffers are made for so many rows at first and doubled as needed


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of several sequences, one row each.

    ``token_ids``, ``positions``, ``slots``: int64 ``[num_tokens]``; ``slots`` says where each row's keys and values
    go. ``sample_rows``: int64 ``[num_sample_rows]``, rows whose logits are wanted. ``spans`` cover all rows.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    spans: Spans

    def on(self, device: torch.device) -> ForwardBatch:
        """The same batch, which is in host memory, on ``device``."""
        if device.type == "cpu":
            return self
        columns = (self.token_ids, self.positions, self.slots, self.sample_rows)
        token_ids, positions, slots, sample_rows = upload([column.numpy() for column in columns], device)
        return ForwardBatch(token_ids, positions, slots, sample_rows, self.spans)


class LlamaModel:
    """Everything remembered of a sequence is in the pool; what is kept between calls are buffers."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        ops = weights.ops
        self._device, dtype = ops.device, ops.row_dtype(weights.dtype)
        self._stack = ops.stack(weights.layers)
        cosines, sines = rope_tables(inverse_frequencies(config.rope, config.head_dim), config.max_positions)
        self._angles = (cosines.to(self._device), sines.to(self._device))
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._residual = _Buffer(config.hidden_size, dtype, self._device)
        self._hidden = _Buffer(config.hidden_size, dtype, self._device)
        self._qkv = _Buffer(queries + 2 * keys, dtype, self._device)
        self._attended = _Buffer(queries, dtype, self._device)
        self._inner = _Buffer(config.intermediate_size, dtype, self._device)
        self._logits = _Buffer(config.vocab_size, torch.float32, self._device)
        self._num_rows = 0  # of the batch in the buffers
        self._host_logits = _Buffer(config.vocab_size, torch.float32, torch.device("cpu"), pinned=True)

    def kv_layout(self, block_size: int) -> BlockLayout:
        """Layout of the KV blocks that this model reads and writes."""
        return self.config.kv_layout(block_size, self.weights.dtype, self.weights.ops.key_order)

    def reserve(self, num_rows: int, num_sample_rows: int) -> None:
        """Make the buffers for steps of so many rows now, not when the first such step comes."""
        for buffer in (self._residual, self._hidden, self._qkv, self._attended, self._inner):
            buffer.rows(num_rows)
        self._logits.rows(num_sample_rows)
        if self._device.type != "cpu":
            self._host_logits.rows(num_sample_rows)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: Tensor) -> Tensor:
        """Compute the batch, write its keys and values into ``pool``, return logits when all of that is done.

        ``batch`` is in host memory. ``pool``: as ``KVCache.pool``, of :meth:`kv_layout`, on the backend's device.
        Returns float32 ``[num_sample_rows, vocab_size]`` in host memory, a buffer that the next call may overwrite; a
        model that only prefills (no sample rows) returns an empty tensor without touching the vocabulary.
        """
        batch = batch.on(self._device)
        config, weights, ops = self.config, self.weights, self.weights.ops
        num_rows = len(batch.token_ids)
        x = self._residual.rows(num_rows)
        ops.embed(batch.token_ids, weights.embedding, x)
        step = DecoderStep(
            x=x,
            hidden=self._hidden.rows(num_rows),
            qkv=self._qkv.rows(num_rows),
            attended=self._attended.rows(num_rows),
            inner=self._inner.rows(num_rows),
            positions=batch.positions,
            slots=batch.slots,
            angles=self._angles,
            eps=config.rms_eps,
            pool=pool,
            plan=ops.plan(batch.spans, config.num_heads, config.num_kv_heads),
        )
        ops.run(self._stack, step)
        self._num_rows = num_rows
        return self._logits_of(batch.sample_rows)

    @torch.inference_mode()
    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of further rows of the batch that :meth:`forward` computed last, as it gives them.

        So that the logits of a whole prompt never have to be in memory at once.
        """
        wanted = torch.tensor(rows, dtype=torch.int64)
        return self._logits_of(wanted if self._device.type == "cpu" else wanted.to(self._device))

    def _logits_of(self, rows: Tensor) -> Tensor:
        weights, ops, count = self.weights, self.weights.ops, len(rows)
        logits = self._logits.rows(count)
        if count:
            last, x = self._hidden.rows(count), self._residual.rows(self._num_rows)
            ops.rms_norm(x, weights.final_norm, self.config.rms_eps, last, rows=rows)
            ops.linear(last, weights.lm_head, logits)
        return self._on_host(logits)

    def _on_host(self, logits: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return logits
        there = self._host_logits.rows(len(logits))
        there.copy_(logits, non_blocking=True)
        # Not only for the logits: whoever is told of this step may send its blocks at once, by another stream.
        torch.cuda.current_stream().synchronize()
        return there


class _Buffer:
    """Rows that are made once and grow when a batch is larger than any before."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False) -> None:
        self._all = torch.empty(0, size, dtype=dtype, device=device)
        self._pinned = pinned

    def rows(self, count: int) -> Tensor:
        """``[count, size]`` of whatever was left there."""
        if count > len(self._all):
            capacity = max(_FIRST_ROWS, 1 << (count - 1).bit_length())
            self._all = torch.empty(
                capacity,
                self._all.shape[1],
                dtype=self._all.dtype,
                device=self._all.device,
                pin_memory=self._pinned,
            )
        return self._all[:count]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position of each rotated pair, float32 ``[head_dim / 2]``.

    In float32 and in the order of operations of Hugging Face, which the checkpoints were trained with: at
    position 8000 one unit in the last place is an angle of 5e-4. ``llama3`` (Llama 3.1) stretches long waves by
    ``factor``, keeps short ones and interpolates between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_stretched = rope.original_max_positions / rope.low_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > shortest_stretched, plain / rope.factor, plain)
    is_between = (wavelength >= longest_kept) & (wavelength <= shortest_stretched)
    return torch.where(is_between, between, stretched)
