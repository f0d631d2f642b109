"""Chooses what computes: one interface, three interchangeable implementations.

:mod:`kernels.reference` specifies every operation; the contract suite (``tests/kernels``) holds all backends to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from kernels.cpu.build import COMPILERS, BuildError, build
from kernels.cpu.prebuilt import find_prebuilt
from kernels.decoder import DecoderLayer, DecoderStep
from kernels.host import Floats, Ids, Rows
from kernels.spans import Spans

log = logging.getLogger(__name__)

WeightKind = Literal["float32", "bfloat16", "int8"]
KeyOrder = Literal["token_major", "dim_major"]
BACKENDS: Final = ("auto", "native", "reference", "triton")


class BackendError(Exception):
    """The backend that was asked for cannot run here; the message says why."""


class Backend(Protocol):
    """The operations of a step. Every result goes into a buffer of the caller's; all tensors are on ``device``.

    Activations are rows of one float type: every backend takes float32, and what its :meth:`row_dtype` names.

    ``pool`` is as ``engine.kv_cache.KVCache.pool``; with ``key_order`` ``dim_major`` the keys of a block lie as
    ``[num_kv_heads, head_dim, block_size]``. ``Any`` stands for what a backend makes for itself: packed weights
    and plans of one backend mean nothing to another.
    """

    name: str
    device: torch.device
    key_order: KeyOrder

    def row_dtype(self, kind: WeightKind) -> torch.dtype:
        """The type of rows that weights of a kind are served with. Raises :class:`BackendError` for no such weights."""
        ...

    def pack(
        self, parts: Iterable[Tensor], shape: tuple[int, int], kind: WeightKind, bias: Tensor | None, *, gate_up: bool
    ) -> Any:
        """Take over a weight of ``shape`` (outputs, inputs), given as consecutive runs of its rows.

        ``parts`` is consumed one by one, so that only one need exist at a time; they may be of any float type.
        Weights packed in the order of their use are read best. ``bias``: float32 ``[outputs]``. With ``gate_up`` the
        first half of the rows are gates, the second half ups.
        """
        ...

    def embed(self, token_ids: Tensor, table: Tensor, out: Tensor) -> None:
        """Rows ``token_ids`` (int64 ``[num_rows]``) of ``table`` (float32 or bfloat16) into ``out``."""
        ...

    def linear(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """``out = x @ weight.T + bias``. ``x``: ``[num_rows, inputs]``, ``out``: ``[num_rows, outputs]``."""
        ...

    def linear_add(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """``out += x @ weight.T + bias``."""
        ...

    def linear_silu_mul(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """``out = silu(x @ gate.T) * (x @ up.T)``, of a weight packed with ``gate_up``."""
        ...

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
        """``out = x / sqrt(mean(x²) + eps) * weight`` by row, after ``x += delta``.

        ``rows``: int64, which rows of ``x`` to take (not together with ``delta``). ``out``: ``[num_rows, size]``.
        """
        ...

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
        """Normalise and rotate queries and keys in place, then write keys and values into their slots.

        ``qkv``: ``[num_rows, (num_heads + 2 * num_kv_heads) * head_dim]``; ``positions``, ``slots``: int64
        ``[num_rows]``; ``angles``: cosines and sines as :func:`kernels.reference.rope_tables`, None for a layer
        without position; ``norms``: query weight, key weight and epsilon, None for a model without.
        """
        ...

    def plan(self, spans: Spans, num_heads: int, num_kv_heads: int) -> Any:
        """Prepare a batch for :meth:`attention`, once for all layers."""
        ...

    def attention(self, qkv: Tensor, pool: Tensor, layer: int, plan: Any, out: Tensor) -> None:
        """Causal attention over the cache, scaled by ``head_dim ** -0.5``; the step's own keys are stored already.

        ``out``: ``[num_rows, num_heads * head_dim]``.
        """
        ...

    def exp_sums(self, matrix: Rows, rows: Ids, shifts: Rows, scales: Rows) -> Floats:
        """See :func:`kernels.host.exp_sums`. In the host's memory: there the sampler works."""
        ...

    def stack(self, layers: Sequence[DecoderLayer]) -> Any:
        """Prepare a model's layers for :meth:`run`, once."""
        ...

    def run(self, stack: Any, step: DecoderStep) -> None:
        """All layers of a step; bit for bit what :func:`kernels.decoder.run_layers` makes of the operations above."""
        ...


def select(
    device: str,
    requested: str,
    *,
    cache_dir: Path,
    threads: int,
    compilers: Sequence[str] = COMPILERS,
) -> Backend:
    """The backend to serve with on ``device`` (``cpu`` or ``cuda``, the current one): what was ``requested`` (one of
    :data:`BACKENDS`), or the fastest that works.

    Kernels built into the installation (:mod:`kernels.cpu.prebuilt`) are taken as they are; else ``cache_dir``
    keeps what is built here. ``threads`` is what a step may use. Raises :class:`BackendError` if the one
    asked for by name cannot run.
    """
    from kernels.reference import Reference

    if requested not in BACKENDS:
        raise BackendError(f"no backend {requested!r}; one of {', '.join(BACKENDS)}")
    if device == "cuda":
        return _triton(requested)
    if device != "cpu":
        raise BackendError(f"device {device!r} is not supported, only cpu and cuda")
    if requested == "triton":
        raise BackendError("triton needs a GPU; this is device cpu")
    if requested == "reference":
        return Reference()
    from kernels.cpu.native import Native

    try:
        return Native(find_prebuilt() or build(cache_dir, compilers), threads)
    except (BuildError, OSError) as error:
        if requested == "native":
            raise BackendError(str(error)) from error
        log.warning(
            "native kernels are not available, serving with plain torch: a step takes 2 to 5 times as long, and a "
            "token's rounding depends on its batch. %s",
            error,
        )
        return Reference()


def _triton(requested: str) -> Backend:
    if requested not in ("auto", "triton"):
        raise BackendError(f"{requested} computes on the CPU, not on device cuda")
    if not torch.cuda.is_available():
        raise BackendError("there is no CUDA device here, or this torch is built without CUDA")
    try:
        from kernels.triton.backend import Triton
    except ImportError as error:
        raise BackendError(f"triton cannot be imported: {error}") from error
    return Triton(torch.device("cuda"))
