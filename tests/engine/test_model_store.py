from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from cluster.config import cache_dir
from cluster.model_store import ModelFilesError, read_config, resolve_model, weight_files, weights_id

CONFIG = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 10, "eos_token_id": 2, "bos_token_id": 1}


def write_safetensors(path: Path, tensors: dict[str, list[float]]) -> None:
    """A float32 safetensors file by hand: these tests need neither torch nor safetensors."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    write_safetensors(directory / "model.safetensors", {"a": [1.0] * 2000, "b": [2.0, 3.0]})
    return directory


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


def test_demo_model_missing_names_the_command() -> None:
    with pytest.raises(ModelFilesError, match="baton model pull smollm2-135m"):
        resolve_model("smollm2-135m")


def test_demo_model_is_found_in_the_cache(model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "models" / "smollm2-135m"
    target.parent.mkdir(parents=True)
    model_dir.rename(target)
    files = resolve_model("smollm2-135m")
    assert (files.directory, files.served_name) == (target, "smollm2-135m")


def test_cache_root_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BATON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "baton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "baton"


def test_local_directory_is_served_by_its_name(model_dir: Path) -> None:
    files = resolve_model(str(model_dir))
    assert (files.directory, files.served_name) == (model_dir, "tiny-model")


@pytest.mark.parametrize("name", ["nope", "../x/y/z", "a/b/c", "", "/does/not/exist"])
def test_unknown_names_are_refused_without_network(name: str) -> None:
    with pytest.raises(ModelFilesError, match="not a hub id"):
        resolve_model(name)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_incomplete_directory_names_what_is_missing(model_dir: Path, missing: str) -> None:
    (model_dir / missing).unlink()
    with pytest.raises(ModelFilesError, match=f"no {missing}"):
        resolve_model(str(model_dir))


def test_pickled_weights_are_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelFilesError, match=r"pickled weights \(pytorch_model.bin\).*safetensors"):
        resolve_model(str(model_dir))


def test_hub_download_takes_only_harmless_files(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    files = resolve_model("org/name")
    assert (files.directory, files.served_name) == (model_dir, "org/name")
    assert asked["name"] == "org/name"
    assert not [pattern for pattern in asked["allow_patterns"] if pattern.endswith((".bin", ".py", ".pt"))]


def test_hub_failure_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(name: str, **_options: Any) -> str:
        raise LocalEntryNotFoundError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelFilesError, match=r"cannot download org/name.*no network.*HF_TOKEN"):
        resolve_model("org/name")


def test_index_decides_which_files_count(model_dir: Path) -> None:
    write_safetensors(model_dir / "model-00001-of-00001.safetensors", {"a": [1.0]})
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert [path.name for path in weight_files(model_dir)] == ["model-00001-of-00001.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ModelFilesError, match="lacks model-00002"):
        weight_files(model_dir)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelFilesError, match="elsewhere"):
        weight_files(model_dir)


def test_weights_id_follows_the_content(model_dir: Path, tmp_path: Path) -> None:
    first = weights_id(model_dir)
    assert len(first) == 32
    copy = tmp_path / "another-place"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes((model_dir / "model.safetensors").read_bytes())
    assert weights_id(copy) == first
    seen = {first}
    variants: list[dict[str, list[float]]] = [
        {"a": [1.0] * 2000, "b": [2.0, 3.5]},
        {"a": [1.0] * 1999 + [0.0], "b": [2.0, 3.0]},
        {"a": [1.0] * 1000 + [0.5] + [1.0] * 999, "b": [2.0, 3.0]},
        {"a": [1.0] * 2000, "c": [2.0, 3.0]},
    ]
    for tensors in variants:
        write_safetensors(copy / "model.safetensors", tensors)
        seen.add(weights_id(copy))
    assert len(seen) == 1 + len(variants)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, (8).to_bytes(8, "little") + b"not json"])
def test_weights_id_refuses_what_is_no_safetensors_file(model_dir: Path, content: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFilesError, match="safetensors"):
        weights_id(model_dir)


def test_config_facts(model_dir: Path) -> None:
    facts = read_config(model_dir)
    assert (facts.model_type, facts.max_position_embeddings, facts.max_model_len) == ("llama", 64, 64)
    assert (facts.vocab_size, facts.eos_token_ids, facts.bos_token_id) == (10, (2,), 1)


def test_generation_config_wins(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    facts = read_config(model_dir)
    assert (facts.eos_token_ids, facts.bos_token_id) == ((5, 6), 1)


@pytest.mark.parametrize(
    ("extra", "max_model_len"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32),
        ({"model_type": "mistral", "sliding_window": None}, 64),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, 64),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, 32),
        ({"model_type": "llama", "sliding_window": 32}, 64),
    ],
)
def test_sliding_window_cuts_the_model_length(model_dir: Path, extra: dict[str, Any], max_model_len: int) -> None:
    (model_dir / "config.json").write_text(json.dumps(CONFIG | extra))
    assert read_config(model_dir).max_model_len == max_model_len


@pytest.mark.parametrize(
    "text", ["", "[]", "{", json.dumps({**CONFIG, "vocab_size": "many"}), json.dumps({"vocab_size": 1})]
)
def test_bad_config_is_refused(model_dir: Path, text: str) -> None:
    (model_dir / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_config(model_dir)


def test_no_eos_is_an_empty_tuple(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": None}))
    assert read_config(model_dir).eos_token_ids == ()
