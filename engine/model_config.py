"""The shape of a Llama-family model, read from its ``config.json``. No torch.

Whatever the model needs and we do not compute exactly is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cluster.model_store import ModelFilesError, read_config, read_raw_config
from kvtransfer.layout import TOKEN_MAJOR, BlockLayout

Dtype = Literal["float32", "bfloat16", "int8"]  # of the weights

SUPPORTED: Final = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_ROPE_THETA: Final = {"smollm3": 2_000_000.0}  # where config.json may leave it out
_DEFAULT_THETA: Final = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and, for types ``linear`` and ``llama3``, how frequencies are scaled."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One Llama-family decoder.

    ``max_positions`` is the longest sequence that we compute exactly: the model's positions, cut to its sliding
    window if it has one. ``rope_layers[i]`` is False for a layer without position embedding (SmolLM3).
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope: RopeConfig
    rope_layers: tuple[bool, ...]
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read ``config.json``. Raises :class:`ModelFilesError` for anything that we cannot compute."""
        facts = read_config(directory)
        raw = read_raw_config(directory)
        _refuse_unsupported(raw)
        model_type = facts.model_type
        hidden_size = _count(raw, "hidden_size")
        num_layers = _count(raw, "num_hidden_layers")
        num_heads = _count(raw, "num_attention_heads")
        default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
        bias = bool(raw.get("attention_bias", False))
        config = cls(
            model_type=model_type,
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_count(raw, "num_key_value_heads", num_heads if model_type == "llama" else None),
            head_dim=_count(raw, "head_dim", default_head_dim),
            vocab_size=facts.vocab_size,
            max_positions=facts.max_model_len,
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(raw, facts.max_position_embeddings),
            rope_layers=_read_rope_layers(raw, num_layers),
            tied_embeddings=bool(raw.get("tie_word_embeddings", model_type == "smollm3")),
            qkv_bias=True if model_type == "qwen2" else bias and model_type != "mistral",
            output_bias=bias and model_type in ("llama", "qwen3", "smollm3"),
            qk_norm=model_type == "qwen3",
        )
        if config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise ModelFilesError(
                f"{config.num_heads} heads over {config.num_kv_heads} KV heads of size {config.head_dim} do not divide"
            )
        return config

    def kv_layout(self, block_size: int, dtype: Dtype = "float32", key_order: str = TOKEN_MAJOR) -> BlockLayout:
        """Layout of this model's KV blocks of ``block_size`` tokens, for weights of ``dtype``."""
        return BlockLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            # Eight bits would need scales in the blocks; what int8 weights lose is more than bfloat16 does.
            dtype="float32" if dtype == "float32" else "bfloat16",
            key_order=key_order,
        )

    @property
    def tag(self) -> str:
        """What besides the weights determines the values in a KV block, for the layout fingerprint."""
        rope_layers = "".join("1" if used else "0" for used in self.rope_layers)
        return f"{self.model_type},eps={self.rms_eps!r},{self.rope!r},rope_layers={rope_layers}"


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    model_type = raw["model_type"]
    architectures = raw.get("architectures") or []
    if model_type not in SUPPORTED or any(not str(name).endswith("ForCausalLM") for name in architectures):
        named = ", ".join(str(name) for name in architectures) or "no architecture named"
        raise ModelFilesError(
            f"cannot serve model_type {model_type!r} ({named}); supported are causal language models of "
            f"{', '.join(SUPPORTED)}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelFilesError(f"weights quantised with {method!r} are not supported; use the unquantised model")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelFilesError(f"hidden_act {activation!r} is not supported, only 'silu'")
    if raw.get("mlp_bias"):
        raise ModelFilesError("mlp_bias is not supported")
    if raw.get("auto_map"):
        raise ModelFilesError("the model brings its own code (auto_map), which is never run")


def _read_rope(raw: dict[str, Any], max_positions: int) -> RopeConfig:
    """Accepts transformers 5's ``rope_parameters`` and the older ``rope_theta`` with ``rope_scaling``."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    default_theta = _ROPE_THETA.get(raw["model_type"], _DEFAULT_THETA)
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or default_theta)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelFilesError(f"partial_rotary_factor {partial} is not supported")
    try:
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, "linear", factor=float(parameters["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta,
                "llama3",
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_positions=int(parameters.get("original_max_position_embeddings") or max_positions),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"rope type {kind!r} lacks or misstates {error}") from error
    raise ModelFilesError(f"rope type {kind!r} is not supported, only default, linear and llama3")


def _read_rope_layers(raw: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    if raw["model_type"] != "smollm3":
        return (True,) * num_layers
    flags = raw.get("no_rope_layers")  # despite its name, 1 means that the layer has rope
    if flags is None:
        interval = int(raw.get("no_rope_layer_interval", 4))
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(flags) < num_layers:
        raise ModelFilesError(f"no_rope_layers names {len(flags)} of {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _count(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFilesError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value
