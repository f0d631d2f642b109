"""One Llama-family decoder, driven by its configuration, over a paged KV pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor

from engine.model_config import ModelConfig, RopeConfig
from engine.weights import LayerWeights, ModelWeights
from kernels.reference import (
    AttentionSpan,
    apply_rope,
    paged_attention,
    rms_norm,
    rope_tables,
    silu_mul,
    store_kv,
)


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
    spans: tuple[AttentionSpan, ...]


class LlamaModel:
    """Stateless between calls: everything remembered of a sequence is in the pool."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._cos, self._sin = rope_tables(frequencies, config.max_positions)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: Tensor) -> Tensor:
        """Compute the batch, write its keys and values into ``pool``, return logits.

        ``pool``: as ``KVCache.pool``, of the weights' dtype. Returns float32 ``[num_sample_rows, vocab_size]``; a model
        that only prefills (no sample rows) returns an empty tensor without touching the vocabulary.
        """
        config, weights = self.config, self.weights
        x = F.embedding(batch.token_ids, weights.embedding)
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(rms_norm(x, layer.input_norm, config.rms_eps), index, layer, batch, pool)
            hidden = rms_norm(x, layer.post_norm, config.rms_eps)
            x = x + layer.down(silu_mul(layer.gate_up(hidden)))
        if batch.sample_rows.numel() == 0:
            return torch.empty(0, config.vocab_size)
        last = rms_norm(x[batch.sample_rows], weights.final_norm, config.rms_eps)
        return weights.lm_head(last).float()

    def _attention(self, x: Tensor, index: int, layer: LayerWeights, batch: ForwardBatch, pool: Tensor) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = rms_norm(q, layer.query_norm, config.rms_eps)
            k = rms_norm(k, layer.key_norm, config.rms_eps)
        if config.rope_layers[index]:
            q, k = apply_rope(q, k, batch.positions, self._cos, self._sin)
        store_kv(pool, index, k, v, batch.slots)
        output = paged_attention(q, pool, index, batch.spans)
        return layer.output(output.view(-1, heads * config.head_dim))


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
