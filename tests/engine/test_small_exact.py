"""The token-exact suite in small: a tiny Llama against Hugging Face, on every backend, interpreted Triton included.

``tests/kernels/test_triton.py`` runs this file once more in a process that interprets Triton's kernels.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_model  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from stepping import Bench, all_logits  # noqa: E402

from cluster.request import SamplingParams  # noqa: E402
from engine.kv_cache import kv_cache  # noqa: E402
from engine.model import LlamaModel  # noqa: E402
from engine.model_config import Dtype, ModelConfig  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402
from tests import backends  # noqa: E402

PROMPTS = ([7], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [index * index % 20 for index in range(38)])
MAX_TOKENS = 7


@dataclass
class Reference:
    directory: Path
    answers: list[list[int]]
    logits: Any


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The model on disk, and what transformers makes of it."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(tiny_model.CONFIG))
    save_file(tiny_model.tensors(), directory / "model.safetensors")
    options = {name: value for name, value in tiny_model.CONFIG.items() if name != "model_type"}
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, **special)).eval()
    model.load_state_dict(tiny_model.tensors())
    answers = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            token_ids = list(prompt)
            for _ in range(MAX_TOKENS):
                token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
            answers.append(token_ids[len(prompt) :])
        logits = model(torch.tensor([PROMPTS[-1]])).logits[0]
    return Reference(directory, answers, logits)


@pytest.fixture(scope="module", params=[*backends.SERVING, *([] if backends.INTERPRETED else [backends.ON_GPU])])
def ops(request: pytest.FixtureRequest) -> Backend:
    return backends.make(request.param)


def runner(directory: Path, ops: Backend, block_size: int, dtype: Dtype = "float32") -> ModelRunner:
    config = ModelConfig.from_directory(directory)
    model = LlamaModel(config, load_weights(directory, config, ops, dtype))
    return ModelRunner(model, kv_cache(model.kv_layout(block_size), 256 // block_size, ops.device))


@pytest.mark.parametrize(("budget", "block_size"), [(5, 4), (16, 8), (64, 16)])
def test_greedy_tokens_equal_hugging_face(reference: Reference, ops: Backend, budget: int, block_size: int) -> None:
    """Prompts cut into chunks of 5, whole, and every mix of them with decode rows."""
    greedy = [SamplingParams(max_tokens=MAX_TOKENS)] * len(PROMPTS)
    bench = Bench(runner(reference.directory, ops, block_size), random.Random(budget))
    assert bench.generate(PROMPTS, greedy, budget) == reference.answers


if backends.INTERPRETED:

    def test_greedy_tokens_of_graphs_equal_hugging_face(reference: Reference) -> None:
        """Decode steps of up to 3 sequences in graphs, of 4 as they are."""
        greedy = [SamplingParams(max_tokens=MAX_TOKENS - index) for index in range(len(PROMPTS))]
        recorded = runner(reference.directory, backends.make("triton-graphs"), 8)
        expected = [answer[: MAX_TOKENS - index] for index, answer in enumerate(reference.answers)]
        assert Bench(recorded, random.Random(1)).generate(PROMPTS, greedy, 64) == expected


@pytest.mark.parametrize("chunk_len", [38, 9])
def test_logits_equal_hugging_face(reference: Reference, ops: Backend, chunk_len: int) -> None:
    found = all_logits(runner(reference.directory, ops, 8), PROMPTS[-1], chunk_len, random.Random(chunk_len))
    assert found.device.type == "cpu"
    assert (found - reference.logits).abs().max().item() < 1e-5 * reference.logits.abs().max().item()


def test_bfloat16_stays_near(reference: Reference, ops: Backend) -> None:
    """Rows of bfloat16 where the backend serves with them, rows of float32 elsewhere."""
    narrow = runner(reference.directory, ops, 8, "bfloat16")
    assert narrow.cache.pool.dtype == torch.bfloat16
    found = all_logits(narrow, PROMPTS[-1], 16, random.Random(3))
    assert found.dtype == torch.float32
    assert (found - reference.logits).abs().mean().item() < 0.05 * reference.logits.std().item()


def test_warming_up_leaves_an_empty_cache(reference: Reference, ops: Backend) -> None:
    warmed = runner(reference.directory, ops, 8)
    assert warmed.warm_up(20) > 0
    assert not warmed.cache.pool.any()
