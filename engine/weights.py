"""Loads a model's weights from safetensors, checked name by name and shape by shape before anything is read.

Only safetensors: pickled files can run code. Only tensors: no code of the model's own, no transformers.
Tensors are read and packed one by one: a second copy of the weights never exists.
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
from engine.model_config import Dtype, ModelConfig
from kernels.backend import Backend
from kernels.decoder import DecoderLayer

_FILE_DTYPES: Final = ("F32", "F16", "BF16")
_EMBEDDING: Final = "model.embed_tokens.weight"
_FINAL_NORM: Final = "model.norm.weight"
_LM_HEAD: Final = "lm_head.weight"
_IGNORED_SUFFIX: Final = ".rotary_emb.inv_freq"  # old checkpoints store what the configuration says
_PIECE_ELEMENTS: Final = 4 << 20  # of a weight in memory at once, while it is packed
_NUM_NAMED: Final = 4  # names shown in an error


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, with the backend that packed them and can read them.

    ``dtype`` is that of the linears. ``embedding`` keeps the file's type (float32 or bfloat16). On the CPU it is the
    mapped file itself, shared between processes: only rows that are looked up come into memory. On a GPU it is a copy,
    also where the output layer is tied to it.
    """

    ops: Backend
    dtype: Dtype
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    lm_head: Any


def load_weights(directory: Path, config: ModelConfig, ops: Backend, dtype: Dtype = "float32") -> ModelWeights:
    """Read, convert to ``dtype``, fuse and pack for ``ops``.

    Raises :class:`ModelFilesError` if weights are missing, pickled, quantised, malformed, or not exactly those of
    ``config``, and :class:`kernels.backend.BackendError` if the backend has no weights of ``dtype``.
    """
    expected = _expected_shapes(config)
    with _open_all(directory) as files:
        _check({name: file for name, (_path, file) in files.items()}, expected, config)
        paths = {name: path for name, (path, _file) in files.items()}
    reader = _Reader(paths, expected, ops, dtype)
    layers = tuple(_load_layer(reader, config, index) for index in range(config.num_layers))
    embedding = reader.read(_EMBEDDING)
    return ModelWeights(
        ops=ops,
        dtype=dtype,
        embedding=(embedding.float() if embedding.dtype == torch.float16 else embedding).to(ops.device),
        layers=layers,
        final_norm=reader.vector(_FINAL_NORM),
        # For a tied model packed from a mapping of its own, which goes; of the lookup table few rows are ever touched.
        lm_head=reader.linear([_EMBEDDING if config.tied_embeddings else _LM_HEAD], bias=False),
    )


def _load_layer(reader: _Reader, config: ModelConfig, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return DecoderLayer(
        input_norm=reader.vector(prefix + "input_layernorm.weight"),
        qkv=reader.linear([f"{attention}{part}_proj.weight" for part in "qkv"], bias=config.qkv_bias),
        query_norm=reader.vector(attention + "q_norm.weight") if config.qk_norm else None,
        key_norm=reader.vector(attention + "k_norm.weight") if config.qk_norm else None,
        output=reader.linear([attention + "o_proj.weight"], bias=config.output_bias),
        post_norm=reader.vector(prefix + "post_attention_layernorm.weight"),
        gate_up=reader.linear([mlp + "gate_proj.weight", mlp + "up_proj.weight"], bias=False, gate_up=True),
        down=reader.linear([mlp + "down_proj.weight"], bias=False),
        rope=config.rope_layers[index],
    )


class _Reader:
    """Reads tensors by name and has the backend pack them.

    Each tensor is read through a mapping of its own, which goes with it. Through one mapping of the whole file every
    page read would stay resident until the end: twice the weights.
    """

    def __init__(
        self, paths: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], ops: Backend, dtype: Dtype
    ) -> None:
        self._paths = paths
        self._shapes = shapes
        self._ops = ops
        self._dtype = dtype

    def read(self, name: str) -> Tensor:
        """As the file has it: a view of the mapped file."""
        try:
            with safe_open(self._paths[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"cannot read {name}: {error}") from error
        return tensor

    def vector(self, name: str) -> Tensor:
        """As float32 on the backend's device, in memory of its own."""
        return self.read(name).to(self._ops.device, torch.float32, copy=True)

    def linear(self, names: list[str], *, bias: bool, gate_up: bool = False) -> Any:
        shape = (sum(self._shapes[name][0] for name in names), self._shapes[names[0]][1])
        offset = torch.cat([self.vector(_bias_of(name)) for name in names]) if bias else None
        parts = (part for name in names for part in self._pieces(name))
        return self._ops.pack(parts, shape, self._dtype, offset, gate_up=gate_up)

    def _pieces(self, name: str) -> Iterator[Tensor]:
        """A weight's rows in runs of a few megabytes, each through its own mapping."""
        num_rows, num_inputs = self._shapes[name]
        step = max(1, _PIECE_ELEMENTS // num_inputs)
        for start in range(0, num_rows, step):
            yield self.read(name)[start : start + step]


def _bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"


@contextmanager
def _open_all(directory: Path) -> Iterator[dict[str, tuple[Path, Any]]]:
    """The file that holds each tensor and its open handle, by tensor name."""
    with ExitStack() as stack:
        owners: dict[str, tuple[Path, Any]] = {}
        for path in weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelFilesError(f"{path} cannot be read: {error}") from error
            names = list(file.keys())
            if doubled := owners.keys() & names:
                raise ModelFilesError(f"{path} repeats {_some(doubled)} of another file; an index file is missing")
            owners.update(dict.fromkeys(names, (path, file)))
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
