"""The layers of a decoder, as every backend takes them, and what a backend without something better does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from kernels.backend import Backend


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: float32 norms, linears as the backend packed them.

    ``qkv`` yields queries, keys, values in this order; ``gate_up`` is for ``linear_silu_mul``. ``rope`` is False for a
    layer without position. ``query_norm`` and ``key_norm`` are both there or both None.
    """

    input_norm: Tensor
    qkv: Any
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Any
    post_norm: Tensor
    gate_up: Any
    down: Any
    rope: bool


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """One batch on its way through the layers.

    ``x``: float32 ``[num_rows, hidden_size]``, the residual stream, changed in place. ``hidden``, ``qkv``,
    ``attended``, ``inner``: buffers of as many rows. ``positions``, ``slots``: int64 ``[num_rows]``. ``angles``: see
    :func:`kernels.reference.rope_tables`. ``plan``: of the backend's own making. All tensors are contiguous.
    """

    x: Tensor
    hidden: Tensor
    qkv: Tensor
    attended: Tensor
    inner: Tensor
    positions: Tensor
    slots: Tensor
    angles: tuple[Tensor, Tensor]
    eps: float
    pool: Tensor
    plan: Any


def run_layers(ops: Backend, layers: Sequence[DecoderLayer], step: DecoderStep) -> None:
    """Pre-norm attention and gated MLP, layer by layer, one operation at a time."""
    x, hidden = step.x, step.hidden
    for index, layer in enumerate(layers):
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm, step.eps)
        ops.rms_norm(x, layer.input_norm, step.eps, hidden)
        ops.linear(hidden, layer.qkv, step.qkv)
        angles = step.angles if layer.rope else None
        ops.rope_store(step.qkv, step.positions, angles, norms, step.pool, index, step.slots)
        ops.attention(step.qkv, step.pool, index, step.plan, step.attended)
        ops.linear_add(step.attended, layer.output, x)
        ops.rms_norm(x, layer.post_norm, step.eps, hidden)
        ops.linear_silu_mul(hidden, layer.gate_up, step.inner)
        ops.linear_add(step.inner, layer.down, x)
