"""The operations of a transformer step in plain torch: the specification that every other backend is tested
against, and what serves where there is no other.

KV pool: ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, keys at index 0 and values at 1. With
key order ``dim_major`` the keys of a block and layer lie as ``[num_kv_heads, head_dim, block_size]`` in the same
bytes. A slot is ``block_id * block_size + offset``. Rows of a batch are tokens; each row's result depends on
other rows only through the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own spelling)
from torch import Tensor

from kernels import host
from kernels.decoder import DecoderLayer, DecoderStep, run_layers
from kernels.spans import Spans

KeyOrder = Literal["token_major", "dim_major"]

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


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 by row: ``weight ≈ values * scales[:, None]``.

    ``weight``: any float type, ``[num_outputs, num_inputs]``. Returns int8 of the same shape and float32
    ``[num_outputs]``; a row of zeros has scale 1.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (wide / scales.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
    return values, scales


class Int8Linear:
    """``x @ (values * scales).T + bias`` with int8 values: exact, and slow, since it widens them at each call."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        """``values``: int8 ``[num_outputs, num_inputs]``; ``scales``, ``bias``: float32 ``[num_outputs]``."""
        self._values, self._scales, self._bias = values, scales, bias

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: float32 ``[num_rows, num_inputs]``; returns float32 ``[num_rows, num_outputs]``."""
        result = F.linear(x, self._values.float()) * self._scales
        return result if self._bias is None else result + self._bias


class Bfloat16Linear:
    """``x @ weight.T + bias`` with bfloat16 weights and float32 rows: exact, and slow for the same reason."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """``weight``: bfloat16 ``[num_outputs, num_inputs]``; ``bias``: float32 ``[num_outputs]``."""
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: float32 ``[num_rows, num_inputs]``; returns float32 ``[num_rows, num_outputs]``."""
        return F.linear(x, self._weight.float(), self._bias)


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


def kv_views(pool: Tensor, key_order: KeyOrder) -> tuple[Tensor, Tensor]:
    """Keys and values of a pool, each ``[num_blocks, num_layers, num_kv_heads, block_size, head_dim]``, as views."""
    keys, values = pool.unbind(2)
    if key_order == "dim_major":
        block_size, head_dim = pool.shape[4:]
        keys = keys.flatten(-2).unflatten(-1, (head_dim, block_size)).transpose(-1, -2)
    return keys, values


def store_kv(
    pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor, key_order: KeyOrder = "token_major"
) -> None:
    """Write keys and values of one layer into their slots.

    ``k``, ``v``: ``[num_tokens, num_kv_heads, head_dim]``; ``slots``: int64 ``[num_tokens]``, all different.
    """
    block_size = pool.shape[4]
    blocks, offsets = slots // block_size, slots % block_size
    for view, rows in zip(kv_views(pool, key_order), (k, v), strict=True):
        view[:, layer].transpose(1, 2)[blocks, offsets] = rows.to(pool.dtype)


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


def paged_attention(
    q: Tensor, pool: Tensor, layer: int, spans: Sequence[AttentionSpan], key_order: KeyOrder = "token_major"
) -> Tensor:
    """Causal attention of a mixed batch over the cache, scaled by ``head_dim ** -0.5``.

    ``q``: ``[num_tokens, num_heads, head_dim]``; query head ``h`` reads KV head ``h // (num_heads / num_kv_heads)``.
    The spans cover all rows once, and their keys and values are stored already. Returns a tensor like ``q``.
    """
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    group = q.shape[1] // num_kv_heads
    caches = [view[:, layer].transpose(0, 1) for view in kv_views(pool, key_order)]
    output = torch.empty_like(q)
    for span in spans:
        gathered = (
            cache.index_select(1, span.block_ids).reshape(1, num_kv_heads, -1, head_dim).to(q.dtype) for cache in caches
        )
        k, v = (one[:, :, : span.context_len] for one in gathered)
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


class Reference:
    """The operations above as a :class:`kernels.backend.Backend`."""

    name = "reference"
    device = torch.device("cpu")
    key_order: KeyOrder = "token_major"

    def row_dtype(self, kind: str) -> torch.dtype:  # noqa: ARG002
        """See :class:`kernels.backend.Backend`."""
        return torch.float32

    def pack(
        self,
        parts: Iterable[Tensor],
        shape: tuple[int, int],
        kind: str,
        bias: Tensor | None,
        *,
        gate_up: bool,  # noqa: ARG002
    ) -> Linear | Bfloat16Linear | Int8Linear:
        """See :class:`kernels.backend.Backend`."""
        held = list(parts)
        weight = torch.cat(held) if len(held) > 1 else held[0]
        if weight.shape != shape:
            raise ValueError(f"a weight of {tuple(weight.shape)} where {shape} was announced")
        if kind == "int8":
            return Int8Linear(*quantize_rows(weight), bias)
        return Bfloat16Linear(weight.bfloat16(), bias) if kind == "bfloat16" else Linear(weight.float(), bias)

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        out.copy_(F.embedding(token_ids, table))

    def linear(self, x: Tensor, weight: Linear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        out.copy_(weight(x))

    def linear_add(self, x: Tensor, weight: Linear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        out.add_(weight(x))

    def linear_silu_mul(self, x: Tensor, weight: Linear, out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        out.copy_(silu_mul(weight(x)))

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        *,
        delta: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """See :class:`kernels.backend.Backend`."""
        if delta is not None:
            x.add_(delta)
        out.copy_(rms_norm(x if rows is None else x[rows], weight, eps))

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        norms: tuple[Tensor, Tensor, float] | None,
        pool: Tensor,
        layer: int,
        slots: Tensor,
    ) -> None:
        """See :class:`kernels.backend.Backend`."""
        kv_heads, head_dim = pool.shape[3], pool.shape[5]
        heads = qkv.view(len(qkv), -1, head_dim)
        q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            q.copy_(rms_norm(q, norms[0], norms[2]))
            k.copy_(rms_norm(k, norms[1], norms[2]))
        if angles is not None:
            for x, rotated in zip((q, k), apply_rope(q, k, positions, *angles), strict=True):
                x.copy_(rotated)
        store_kv(pool, layer, k, v, slots, self.key_order)

    def plan(self, spans: Spans, num_heads: int, num_kv_heads: int) -> tuple[AttentionSpan, ...]:  # noqa: ARG002
        """See :class:`kernels.backend.Backend`."""
        starts = spans.table_starts
        return tuple(
            attention_span(
                int(spans.first_rows[i]),
                int(spans.num_rows[i]),
                int(spans.context_lens[i]),
                torch.from_numpy(spans.block_ids[starts[i] : starts[i + 1]]).long(),
            )
            for i in range(len(spans.num_rows))
        )

    def attention(self, qkv: Tensor, pool: Tensor, layer: int, plan: Sequence[AttentionSpan], out: Tensor) -> None:
        """See :class:`kernels.backend.Backend`."""
        head_dim = pool.shape[5]
        q = qkv[:, : out.shape[1]].view(len(qkv), -1, head_dim)
        out.copy_(paged_attention(q, pool, layer, plan, self.key_order).view_as(out))

    def exp_sums(self, matrix: host.Rows, rows: host.Ids, shifts: host.Rows, scales: host.Rows) -> host.Floats:
        """See :class:`kernels.backend.Backend`."""
        return host.exp_sums(matrix, rows, shifts, scales)

    def stack(self, layers: Sequence[DecoderLayer]) -> tuple[DecoderLayer, ...]:
        """See :class:`kernels.backend.Backend`."""
        return tuple(layers)

    def run(self, stack: Sequence[DecoderLayer], step: DecoderStep) -> None:
        """See :class:`kernels.backend.Backend`."""
        run_layers(self, stack, step)
