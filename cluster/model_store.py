"""Where a model's files are, and what a process without torch may know of them.

A name is the demo model (:data:`DEMO_MODEL`, converted once into the user's cache by ``engine.demo_model``),
a local directory, or a Hugging Face hub id. All three end as one directory in the Hugging Face layout with
safetensors weights; pickled weights are never opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from cluster.config import cache_dir

DEMO_MODEL: Final = "smollm2-135m"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES: Final = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
# Sub-folders hold other formats (onnx, original), consolidated* a second copy of the same weights.
_HUB_SKIPPED: Final = ("*/*", "consolidated*")

_INDEX_NAME: Final = "model.safetensors.index.json"
_PICKLE_PATTERNS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER_BYTES: Final = 100 << 20
_SAMPLE_BYTES: Final = 1024


class ModelFilesError(Exception):
    """A model cannot be found or read; the message says what to do next."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """``directory`` holds config.json, tokenizer.json, safetensors; clients ask for ``served_name``."""

    directory: Path
    served_name: str


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model's configuration that every process needs, whatever the architecture.

    ``max_model_len`` is the longest sequence we serve: ``max_position_embeddings``, cut to the sliding window of
    models that have one (within it, windowed and full attention are the same). ``vocab_size`` counts the rows
    of the embedding and may exceed the tokenizer's. ``eos_token_ids`` is empty if the model names none.
    """

    model_type: str
    max_position_embeddings: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def demo_model_directory() -> Path:
    """Where the converted demo model lies, or will lie."""
    return cache_dir() / "models" / DEMO_MODEL


def resolve_model(name: str) -> ModelFiles:
    """Find (for a hub id: download) the files of ``name``.

    Raises :class:`ModelFilesError` if there is no such model or its files cannot be served.
    """
    if name == DEMO_MODEL:
        directory = demo_model_directory()
        if not (directory / "config.json").is_file():
            raise ModelFilesError(f"{name} is not in {directory} yet; run: baton model pull {name}")
        served_name = name
    elif name and Path(name).expanduser().is_dir():
        directory = Path(name).expanduser().resolve()
        served_name = directory.name
    elif _HUB_ID.fullmatch(name):
        directory = _download(name)
        served_name = name
    else:
        raise ModelFilesError(
            f"no model {name!r}: not {DEMO_MODEL!r}, not a directory and not a hub id like 'org/name'"
        )
    _check_directory(directory)
    return ModelFiles(directory=directory, served_name=served_name)


def read_config(directory: Path) -> ModelFacts:
    """Read ``config.json`` and ``generation_config.json`` (whose token ids win).

    Raises :class:`ModelFilesError` for missing files, bad JSON or missing fields.
    """
    config = read_raw_config(directory)
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    max_positions = config.get("max_position_embeddings")
    merged = {
        "model_type": config.get("model_type"),
        "max_position_embeddings": max_positions,
        "max_model_len": _cut_to_window(max_positions, config),
        "vocab_size": config.get("vocab_size"),
        "eos_token_ids": _token_ids(_first(generation, config, key="eos_token_id")),
        "bos_token_id": _first(generation, config, key="bos_token_id"),
    }
    try:
        return msgspec.convert(merged, ModelFacts)
    except msgspec.ValidationError as error:
        raise ModelFilesError(f"{directory / 'config.json'}: {error}") from error


def read_raw_config(directory: Path) -> dict[str, Any]:
    """``config.json`` as it is. Raises :class:`ModelFilesError` if it is missing or not a JSON object."""
    return _read_json(directory / "config.json")


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, in name order: those its index names, else ``*.safetensors``.

    Raises :class:`ModelFilesError` if there are none, if only pickled weights exist, or if the index names a
    file that is missing or lies outside ``directory``.
    """
    index_path = directory / _INDEX_NAME
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelFilesError(f"{index_path} has no weight_map")
        names = sorted({str(value) for value in weight_map.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelFilesError(f"{index_path} names {name!r}: not a safetensors file beside it")
        files = tuple(directory / name for name in names)
    else:
        files = tuple(sorted(directory.glob("*.safetensors")))
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelFilesError(f"{directory} lacks {', '.join(missing)}: incomplete, fetch it again")
    if not files:
        raise ModelFilesError(_no_weights_message(directory))
    return files


def weights_id(directory: Path) -> str:
    """Content id of a model's weights, 32 hex digits, the same on every machine that has the same files.

    Hashes each file's name, size and whole safetensors header (every tensor's name, type, shape and place)
    and the first, middle and last KiB of every tensor: other weights of the same shape differ there, at a
    cost of milliseconds instead of reading gigabytes. It tells models apart; it does not find a damaged file.
    Raises :class:`ModelFilesError` as :func:`weight_files`, and for malformed headers.
    """
    digest = blake2b(digest_size=16, person=b"baton-weights")
    for path in weight_files(directory):
        for part in _identity_parts(path):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _identity_parts(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield path.name.encode()
    yield size.to_bytes(8, "little")
    with path.open("rb", buffering=0) as file:
        header_len = int.from_bytes(file.read(8), "little")
        if not 0 < header_len <= min(size - 8, _MAX_HEADER_BYTES):
            raise ModelFilesError(f"{path} is not a safetensors file")
        header = file.read(header_len)
        yield header
        data_start = 8 + header_len
        for begin, end in _tensor_spans(path, header):
            for offset in sorted({begin, (begin + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES}):
                start = max(begin, offset)
                yield os.pread(file.fileno(), min(_SAMPLE_BYTES, end - start), data_start + start)


def _tensor_spans(path: Path, header: bytes) -> list[tuple[int, int]]:
    try:
        entries: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
        entries.pop("__metadata__", None)
        spans = [(int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in entries.values()]
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelFilesError(f"{path} has a malformed safetensors header") from error
    return sorted(spans)


def _check_directory(directory: Path) -> None:
    if missing := [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]:
        raise ModelFilesError(f"{directory} is not a model directory: no {' and no '.join(missing)}")
    weight_files(directory)


def _no_weights_message(directory: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLE_PATTERNS for path in directory.glob(pattern))
    if pickled:
        return (
            f"{directory} has only pickled weights ({', '.join(pickled[:3])}), which can run code; "
            "convert them first: transformers' from_pretrained(...).save_pretrained(...) writes safetensors"
        )
    return f"{directory} has no *.safetensors files"


def _download(name: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelFilesError(
            f"downloading {name} needs huggingface_hub: pip install it, or give a local directory"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_SKIPPED))
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelFilesError(
            f"cannot download {name} from the hub ({type(error).__name__}: {_first_line(error)}); check the "
            "name, the network and, for a gated model, HF_TOKEN; or use the demo model: "
            f"baton model pull {DEMO_MODEL}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return cast(dict[str, Any], content)


def _cut_to_window(max_positions: object, config: dict[str, Any]) -> object:
    window = config.get("sliding_window")
    # Mistral has no switch: its window counts unless it is null.
    used = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if used and isinstance(window, int) and isinstance(max_positions, int):
        return min(max_positions, window)
    return max_positions


def _first(*sources: dict[str, Any], key: str) -> object:
    return next((source[key] for source in sources if source.get(key) is not None), None)


def _token_ids(value: object) -> object:
    if value is None:
        return ()
    return value if isinstance(value, list) else (value,)
