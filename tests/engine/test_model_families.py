"""Random small models of every supported family, logits against Hugging Face."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from stepping import all_logits  # noqa: E402

from engine.kv_cache import KVCache  # noqa: E402
from engine.model import LlamaModel  # noqa: E402
from engine.model_config import Dtype, ModelConfig  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 6},
    "llama-mqa-wide-heads": {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 32},
    "llama-llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "mistral-window": {"model_type": "mistral", "sliding_window": 100},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "smollm3-untied": {"model_type": "smollm3", "no_rope_layers": [0, 1, 1], "tie_word_embeddings": False},
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A saved model with every parameter random, biases and norms too, and the same model in transformers."""
    options = SMALL | FAMILIES[request.param]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def load(directory: Path, ops: Backend, block_size: int = 16, dtype: Dtype = "float32") -> ModelRunner:
    config = ModelConfig.from_directory(directory)
    model = LlamaModel(config, load_weights(directory, config, ops, dtype))
    return ModelRunner(model, KVCache(model.kv_layout(block_size), 40))


def test_logits_equal_hugging_face(family: tuple[Path, Any], ops: Backend) -> None:
    directory, reference = family
    rng = random.Random(1)
    token_ids = [rng.randrange(97) for _ in range(90)]
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.3
    for chunk_len, block_size in ((90, 16), (13, 32), (1, 16)):
        found = all_logits(load(directory, ops, block_size), token_ids, chunk_len, rng)
        assert (found - expected).abs().max().item() < 1e-4 * max(1.0, expected.abs().max().item())
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["llama-llama3-rope", "llama-linear-rope", "llama"], indirect=True)
def test_old_spelling_of_rope_means_the_same(family: tuple[Path, Any]) -> None:
    directory, _ = family
    before = ModelConfig.from_directory(directory)
    raw = json.loads((directory / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    (directory / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_directory(directory) == before


@pytest.mark.parametrize("family", ["llama", "qwen3"], indirect=True)
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("int8", 0.1)])
def test_narrow_weights_stay_near(family: tuple[Path, Any], ops: Backend, dtype: Dtype, limit: float) -> None:
    directory, reference = family
    runner = load(directory, ops, 16, dtype)
    assert runner.cache.pool.dtype == torch.bfloat16
    token_ids = list(range(40))
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    found = all_logits(runner, token_ids, 16, random.Random(2))
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean().item() < limit * expected.std().item()


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_a_cache_of_another_layout_is_refused(family: tuple[Path, Any], ops: Backend) -> None:
    runner = load(family[0], ops)
    other = "token_major" if ops.key_order == "dim_major" else "dim_major"
    for layout in (runner.model.config.kv_layout(16, "bfloat16"), runner.model.config.kv_layout(16, key_order=other)):
        with pytest.raises(ValueError, match="does not fit"):
            ModelRunner(runner.model, KVCache(layout, 2))
