from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.model_store import ModelFilesError
from engine.model_config import ModelConfig, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}


def read(tmp_path: Path, **changes: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    return ModelConfig.from_directory(tmp_path)


def test_llama(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.num_kv_heads, config.rope) == (16, 2, RopeConfig(10_000.0))
    assert (config.tied_embeddings, config.qkv_bias, config.output_bias, config.qk_norm) == (False,) * 4
    assert config.rope_layers == (True, True, True)


def test_kv_layout(tmp_path: Path) -> None:
    layout = read(tmp_path).kv_layout(32)
    assert layout.block_shape == (3, 2, 2, 32, 16)
    assert layout.token_bytes == 3 * 2 * 2 * 16 * 4
    assert layout.block_bytes == 32 * layout.token_bytes
    tags = {read(tmp_path).kv_layout(size, dtype) for size in (16, 32) for dtype in ("float32", "bfloat16")}  # type: ignore[arg-type]
    assert len(tags) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, **changes).rope == RopeConfig(500.0, "linear", factor=2.0)


def test_llama3_rope_defaults_to_the_model_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read(tmp_path, rope_scaling=scaling).rope.original_max_positions == 256
    scaling["original_max_position_embeddings"] = 64
    assert read(tmp_path, rope_scaling=scaling).rope == RopeConfig(10_000.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_family_differences(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, model_type="qwen3")
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    smollm3 = read(tmp_path, model_type="smollm3", no_rope_layer_interval=2)
    assert (smollm3.rope_layers, smollm3.rope.theta, smollm3.tied_embeddings) == ((True, False, True), 2e6, True)
    mistral = read(tmp_path, model_type="mistral", head_dim=None, sliding_window=100)
    assert (mistral.head_dim, mistral.max_positions) == (16, 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, "gemma2.*Gemma2ForCausalLM.*qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"auto_map": {"AutoModel": "modeling.py"}}, "auto_map"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        read(tmp_path, **changes)


def test_tag_holds_what_changes_the_cache(tmp_path: Path) -> None:
    variants = [{}, {"rope_theta": 5.0}, {"rms_norm_eps": 1e-6}, {"model_type": "qwen2"}]
    assert len({read(tmp_path, **changes).tag for changes in variants}) == len(variants)
