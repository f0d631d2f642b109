"""The operations of a transformer step in plain torch: the specification that every other backend is tested
against, and what serves where there is no other.

KV pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, keys at index 0 and values at 1.
A slot is ``block_id * block_size + offset``. Rows of a batch are tokens; each row's result depends on other
rows only through the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor

_ONEDNN_ROWS = 16  # the batch size that oneDNN lays the packed weight out for


class Linear:
    """``x @ weight.T + bias``, holding the only copy of its weight, packed for oneDNN where that helps.

    On CPUs MKL needs twice the time of a batch of 1 for a batch of 4; oneDNN on packed float32 weights does not,
    and its rows hardly depend on the batch size. bfloat16 is left to torch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """``weight``: ``[num_outputs, num_inputs]``, float32 or bfloat16; ``bias``: ``[num_outputs]``."""
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: ``[num_rows, num_inputs]``; returns ``[num_rows, num_outputs]``."""
        if self._packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return result
        return F.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    # Private operators (Inductor's freezing emits them), so a torch without them falls back.
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in float32.

    ``x``: ``[..., size]``; ``weight``: ``[size]``; returns ``x``'s shape and type.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``. ``gate_up``: ``[num_rows, 2 * size]``, gate first; returns ``[num_rows, size]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_tables(inverse_frequencies: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, float32 ``[num_positions, head_dim / 2]`` each.

    ``inverse_frequencies``: float32 ``[head_dim / 2]``, radians a position.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    return angles.cos(), angles.sin()


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions; Hugging Face's convention, pairs are ``(i, i + head_dim / 2)``.

    ``q``: ``[num_tokens, num_heads, head_dim]``; ``k``: ``[num_tokens, num_kv_heads, head_dim]``; ``positions``:
    int64 ``[num_tokens]``; ``cos``, ``sin``: as :func:`rope_tables`. Returns new tensors like ``q`` and ``k``.
    """
    row_cos = cos[positions].to(q.dtype).unsqueeze(1)
    row_sin = sin[positions].to(q.dtype).unsqueeze(1)
    return _rotate(q, row_cos, row_sin), _rotate(k, row_cos, row_sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def store_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write keys and values of one layer into their slots.

    ``k``, ``v``: ``[num_tokens, num_kv_heads, head_dim]``; ``slots``: int64 ``[num_tokens]``, all different.
    """
    block_size = pool.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    pool[:, layer].permute(0, 3, 1, 2, 4)[blocks, offsets] = torch.stack((k, v), dim=1)


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One sequence's rows in a batch: rows ``first_row .. first_row + num_rows - 1`` are its last positions.

    ``block_ids``: int64 ``[num_blocks]``, exactly the blocks of the first ``context_len`` positions (the span's
    own included). ``mask``: bool ``[num_rows, context_len]``, True where a row may look, or None where no mask
    is needed: a single row, or a whole prompt from position 0.
    """

    first_row: int
    num_rows: int
    context_len: int
    block_ids: Tensor
    mask: Tensor | None


def attention_span(first_row: int, num_rows: int, context_len: int, block_ids: Tensor) -> AttentionSpan:
    """Build a span and, once for all layers, its mask."""
    mask = None
    start = context_len - num_rows
    if num_rows > 1 and start > 0:
        columns = torch.arange(context_len, device=block_ids.device)
        mask = columns <= columns[start:].unsqueeze(1)
    return AttentionSpan(first_row, num_rows, context_len, block_ids, mask)


def paged_attention(q: Tensor, pool: Tensor, layer: int, spans: Sequence[AttentionSpan]) -> Tensor:
    """Causal attention of a mixed batch over the cache, scaled by ``head_dim ** -0.5``.

    ``q``: ``[num_tokens, num_heads, head_dim]``; query head ``h`` reads KV head ``h // (num_heads / num_kv_heads)``.
    The spans cover all rows once, and their keys and values are stored already. Returns a tensor like ``q``.
    """
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    # The layer as [2, kv_heads, num_blocks, block_size, head_dim]: one gather yields contiguous keys and values.
    cache = pool[:, layer].permute(1, 2, 0, 3, 4)
    output = torch.empty_like(q)
    for span in spans:
        gathered = cache.index_select(2, span.block_ids).view(2, 1, num_kv_heads, -1, head_dim)
        k, v = gathered[:, :, :, : span.context_len].unbind(0)
        rows = slice(span.first_row, span.first_row + span.num_rows)
        if span.num_rows == 1:
            # The heads of a group become rows, so that no key is read twice.
            one = F.scaled_dot_product_attention(q[rows].view(1, num_kv_heads, group, head_dim), k, v)
            output[rows] = one.view(1, -1, head_dim)
            continue
        many = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=span.mask,
            is_causal=span.mask is None,
            enable_gqa=True,
        )
        output[rows] = many.squeeze(0).transpose(0, 1)
    return output
