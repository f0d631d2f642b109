from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_model import CONFIG, tensors  # noqa: E402

from cluster.model_store import ModelFilesError  # noqa: E402
from engine.model_config import ModelConfig  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def test_fused_projections_are_the_parts_side_by_side(model_dir: Path, ops: Backend) -> None:
    weights = load_weights(model_dir, ModelConfig.from_directory(model_dir), ops)
    named, x = tensors(), torch.randn(3, 16)
    layer = weights.layers[1]
    parts = [x @ named[f"model.layers.1.self_attn.{name}_proj.weight"].T for name in "qkv"]
    assert torch.allclose(linear(ops, x, layer.qkv, 32), torch.cat(parts, -1), atol=1e-5)
    gate, up = (x @ named[f"model.layers.1.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    inner = torch.empty(3, 24)
    ops.linear_silu_mul(x, layer.gate_up, inner)
    assert torch.allclose(inner, torch.nn.functional.silu(gate) * up, atol=1e-5)
    assert torch.equal(weights.embedding, named["model.embed_tokens.weight"])
    assert torch.allclose(linear(ops, x, weights.lm_head, 20), x @ named["lm_head.weight"].T, atol=1e-5)


def linear(ops: Backend, x: torch.Tensor, weight: object, num_outputs: int) -> torch.Tensor:
    out = torch.empty(len(x), num_outputs)
    ops.linear(x, weight, out)
    return out


def test_shards_load_through_their_index(model_dir: Path, ops: Backend) -> None:
    named = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(named))}
    for file in set(files.values()):
        save_file({name: named[name] for name in named if files[name] == file}, model_dir / file)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    weights = load_weights(model_dir, ModelConfig.from_directory(model_dir), ops)
    assert torch.equal(weights.final_norm, named["model.norm.weight"])


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_and_computed_types_are_independent(model_dir: Path, ops: Backend, stored: torch.dtype) -> None:
    save_file({name: value.to(stored) for name, value in tensors().items()}, model_dir / "model.safetensors")
    config = ModelConfig.from_directory(model_dir)
    wide = load_weights(model_dir, config, ops)
    assert wide.final_norm.dtype == torch.float32
    assert wide.embedding.dtype == (torch.float32 if stored == torch.float16 else stored)
    narrow = load_weights(model_dir, config, ops, "bfloat16")
    x = torch.randn(2, 24)
    expected = linear(ops, x, wide.layers[0].down, 16)
    assert torch.allclose(linear(ops, x, narrow.layers[0].down, 16), expected, atol=0.2)


def test_pickled_weights_are_never_opened(model_dir: Path, ops: Backend) -> None:
    config = ModelConfig.from_directory(model_dir)
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match="pickled"):
        load_weights(model_dir, config, ops)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"lack model\.norm\.weight"),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}, "does not have"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}, "does not have"),
        ({"model.norm.weight": torch.zeros(17)}, "17.*16"),
        ({"model.norm.weight": torch.zeros(16, dtype=torch.int8)}, "I8"),
    ],
)
def test_weights_must_be_exactly_the_models(
    model_dir: Path, ops: Backend, change: dict[str, object], message: str
) -> None:
    named = {name: value for name, value in (tensors() | change).items() if value is not None}
    save_file(named, model_dir / "model.safetensors")
    with pytest.raises(ModelFilesError, match=message):
        load_weights(model_dir, ModelConfig.from_directory(model_dir), ops)


def test_harmless_extras_are_ignored(model_dir: Path, ops: Backend) -> None:
    (model_dir / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(tensors() | extra, model_dir / "model.safetensors")
    weights = load_weights(model_dir, ModelConfig.from_directory(model_dir), ops)
    x = torch.randn(2, 16)
    assert torch.allclose(linear(ops, x, weights.lm_head, 20), x @ weights.embedding.T, atol=1e-5)


def test_damaged_file_is_an_error_not_a_crash(model_dir: Path, ops: Backend) -> None:
    content = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFilesError, match="cannot be read"):
        load_weights(model_dir, ModelConfig.from_directory(model_dir), ops)
