"""Loads a model's weights from safetensors, checked name by name and shape by shape before anything is read.

Only safetensors: pickled files can run code. Only tensors: no code of the model's own, no transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.model_store import ModelFilesError, weight_files
from engine.kv_cache import TORCH_DTYPES
from engine.model_config import Dtype, ModelConfig
from kernels.reference import Linear

_FILE_DTYPES: Final = ("F32", "F16", "BF16")
_EMBEDDING: Final = "model.embed_tokens.weight"
_FINAL_NORM: Final = "model.norm.weight"
_LM_HEAD: Final = "lm_head.weight"
_IGNORED_SUFFIX: Final = ".rotary_emb.inv_freq"  # old checkpoints store what the configuration says
_NUM_NAMED: Final = 4  # names shown in an error


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. ``qkv`` yields queries, keys, values in this order; ``gate_up`` gate, then up."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, in one type. ``embedding`` may be the mapped file itself, shared between processes."""

    dtype: Dtype
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


def load_weights(directory: Path, config: ModelConfig, dtype: Dtype = "float32") -> ModelWeights:
    """Read, convert to ``dtype``, fuse and pack.

    Raises :class:`ModelFilesError` if weights are missing, pickled, quantised, malformed, or not exactly those of
    ``config``.
    """
    expected = _expected_shapes(config)
    with _open_all(directory) as files:
        _check(files, expected, config)
        reader = _Reader(files, TORCH_DTYPES[dtype])
        embedding = reader.read(_EMBEDDING)
        return ModelWeights(
            dtype=dtype,
            embedding=embedding,
            layers=tuple(_load_layer(reader, config, index) for index in range(config.num_layers)),
            final_norm=reader.read(_FINAL_NORM),
            lm_head=Linear(embedding if config.tied_embeddings else reader.read(_LM_HEAD)),
        )


def _load_layer(reader: _Reader, config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LayerWeights(
        input_norm=reader.read(prefix + "input_layernorm.weight"),
        qkv=reader.linear([attention + part for part in ("q_proj", "k_proj", "v_proj")], bias=config.qkv_bias),
        query_norm=reader.read(attention + "q_norm.weight") if config.qk_norm else None,
        key_norm=reader.read(attention + "k_norm.weight") if config.qk_norm else None,
        output=reader.linear([attention + "o_proj"], bias=config.output_bias),
        post_norm=reader.read(prefix + "post_attention_layernorm.weight"),
        gate_up=reader.linear([mlp + "gate_proj", mlp + "up_proj"], bias=False),
        down=reader.linear([mlp + "down_proj"], bias=False),
    )


class _Reader:
    """Reads tensors by name as one dtype. Without conversion a tensor is a view of the mapped file."""

    def __init__(self, files: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._files = files
        self._dtype = dtype

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelFilesError(f"cannot read {name}: {error}") from error
        return tensor.to(self._dtype)

    def linear(self, names: list[str], *, bias: bool) -> Linear:
        weight = self._joined(names, ".weight")
        return Linear(weight, self._joined(names, ".bias") if bias else None)

    def _joined(self, names: list[str], suffix: str) -> Tensor:
        parts = [self.read(name + suffix) for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


@contextmanager
def _open_all(directory: Path) -> Iterator[dict[str, Any]]:
    """The open file that holds each tensor, by tensor name."""
    with ExitStack() as stack:
        owners: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelFilesError(f"{path} cannot be read: {error}") from error
            names = list(file.keys())
            if doubled := owners.keys() & names:
                raise ModelFilesError(f"{path} repeats {_some(doubled)} of another file; an index file is missing")
            owners.update(dict.fromkeys(names, file))
        yield owners


def _check(files: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    if missing := expected.keys() - files.keys():
        raise ModelFilesError(f"the weights lack {_some(missing)}")
    unknown = {name for name in files.keys() - expected.keys() if not name.endswith(_IGNORED_SUFFIX)}
    if config.tied_embeddings:
        unknown.discard(_LM_HEAD)  # a copy of the embedding
    if unknown:
        raise ModelFilesError(f"the weights hold {_some(unknown)}, which {config.model_type} does not have")
    for name, shape in expected.items():
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ModelFilesError(f"{name} has shape {list(found.get_shape())}, config.json says {list(shape)}")
        if found.get_dtype() not in _FILE_DTYPES:
            raise ModelFilesError(f"{name} is {found.get_dtype()}; only {', '.join(_FILE_DTYPES)} are supported")


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[_LM_HEAD] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {
            f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (queries, keys, keys), strict=True)
        }
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_NUM_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
