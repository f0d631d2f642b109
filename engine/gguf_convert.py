"""Turns the demo model's GGUF file into a Hugging Face directory. Imports torch and transformers (seconds)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

NUM_PARAMETERS = 134_515_008
MAX_POSITIONS = 8192
NUM_STEPS = 3

_BOS, _EOS, _UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


class ConversionError(Exception):
    """The GGUF file is not the model it should be."""


def convert(gguf_path: Path, target: Path, step: Callable[[str], None]) -> None:
    """Write the model of ``gguf_path`` as fp32 safetensors, configuration and tokenizer into ``target``.

    ``step`` is called with a description before each of the :data:`NUM_STEPS` steps. Takes 10 to 40 s and about
    2 GB of memory. Raises :class:`ConversionError` if the result is not SmolLM2-135M-Instruct.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        # gguf and transformers warn about read-only buffers and each other's deprecated names.
        warnings.simplefilter("ignore")
        step("read the tokenizer")
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
        step("dequantise the weights")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf_path.parent,
            gguf_file=gguf_path.name,
            dtype=torch.float32,
            # Without it the weights stay packed and cannot be saved.
            quantization_config=transformers.GgufConfig(gguf_file=gguf_path.name, dequantize=True),
        )
        if (found := sum(weight.numel() for weight in model.parameters())) != NUM_PARAMETERS:
            raise ConversionError(f"{gguf_path.name} has {found} parameters, expected {NUM_PARAMETERS}")
        step("save safetensors")
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    _finish_config(target)
    _finish_tokenizer(target)
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors writes 600, and another user may serve from a shared cache


def _finish_config(target: Path) -> None:
    with _edited_json(target / "config.json") as config:
        config.pop("_model_name_or_path", None)
        config["rms_norm_eps"] = 1e-05  # GGUF keeps it in float32
    with _edited_json(target / "generation_config.json") as generation:
        generation.pop("_from_model_config", None)


def _finish_tokenizer(target: Path) -> None:
    """Put back what GGUF cannot express: single digits, special roles, the context length."""
    with _edited_json(target / "tokenizer.json") as tokenizer:
        byte_level = tokenizer["pre_tokenizer"]
        if byte_level["type"] != "ByteLevel":
            raise ConversionError(f"unexpected pre-tokenizer {byte_level['type']}")
        # tokenizer.ggml.pre = smollm: without the split, spaces before digits are tokenised differently.
        tokenizer["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        }
        ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        if (ids.get(_UNKNOWN), ids.get(_BOS), ids.get(_EOS)) != (0, 1, 2):
            raise ConversionError("unexpected ids of the special tokens")
    template_path = target / "chat_template.jinja"
    template = template_path.read_text(encoding="utf-8")
    template_path.unlink()
    settings = {
        "additional_special_tokens": [_BOS, _EOS],
        "bos_token": _BOS,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": _EOS,
        "model_max_length": MAX_POSITIONS,
        "pad_token": _EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _UNKNOWN,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _edited_json(path: Path) -> Iterator[dict[str, Any]]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    yield content
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
