"""SmolLM2-135M: logits and greedy tokens against Hugging Face, however the work is cut and mixed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from stepping import Bench, all_logits  # noqa: E402

from cluster.request import SamplingParams  # noqa: E402
from engine.kv_cache import KVCache  # noqa: E402
from engine.model import LlamaModel  # noqa: E402
from engine.model_config import ModelConfig  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402

EOS = 2
MAX_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "2 + 2 =",
    "List three colours, with  12  words in all.",
    "Explain to a child why the sky is blue, and why it turns red when the sun goes down. " * 3,
)


@dataclass
class Reference:
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[Any]


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Reference:
    """Prompts with what transformers computes for them, through end-of-sequence only."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    prompts, answers, logits = [], [], []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**encoded, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
        num_prompt = encoded["input_ids"].shape[1]
        prompts.append(output[:num_prompt].tolist())
        answers.append(output[num_prompt:].tolist())
        with torch.inference_mode():
            logits.append(model(encoded["input_ids"]).logits[0])
    return Reference(prompts, answers, logits)


@pytest.fixture(scope="module")
def model(smollm2_dir: Path, ops: Backend) -> LlamaModel:
    config = ModelConfig.from_directory(smollm2_dir)
    return LlamaModel(config, load_weights(smollm2_dir, config, ops))


def bench(model: LlamaModel, block_size: int, seed: int) -> Bench:
    runner = ModelRunner(model, KVCache(model.kv_layout(block_size), 1600 // block_size))
    return Bench(runner, random.Random(seed), EOS)


def test_the_demo_model_knows_paris(reference: Reference) -> None:
    assert reference.answers[0][-1] == EOS
    assert len(reference.answers[0]) == 8


@pytest.mark.parametrize(("chunk_len", "block_size"), [(512, 16), (48, 32), (13, 16), (1, 32)])
def test_logits_equal_hugging_face(model: LlamaModel, reference: Reference, chunk_len: int, block_size: int) -> None:
    runner = bench(model, block_size, 0).runner
    for prompt, expected in zip(reference.prompts[:2], reference.logits[:2], strict=True):
        found = all_logits(runner, prompt, chunk_len, random.Random(chunk_len))
        assert (found - expected).abs().max().item() < 2e-4


@pytest.mark.parametrize(("budget", "block_size"), [(13, 16), (48, 32), (512, 16), (512, 32)])
def test_greedy_tokens_equal_hugging_face(
    model: LlamaModel, reference: Reference, budget: int, block_size: int
) -> None:
    greedy = [SamplingParams(max_tokens=MAX_TOKENS)] * len(reference.prompts)
    assert bench(model, block_size, budget).generate(reference.prompts, greedy, budget) == reference.answers


def test_sampled_tokens_do_not_depend_on_cutting_or_company(model: LlamaModel, reference: Reference) -> None:
    wishes = [
        SamplingParams(
            max_tokens=6,
            temperature=0.7 + index / 10,
            top_p=(1.0, 0.9)[index % 2],
            repetition_penalty=(1.0, 1.0, 1.3)[index % 3],
            frequency_penalty=(0.0, 0.5)[index % 2],
            seed=index,
        )
        for index in range(len(reference.prompts))
    ]
    together = bench(model, 16, 1).generate(reference.prompts, wishes, 48)
    for index in (0, 3):
        alone = bench(model, 32, 2).generate([reference.prompts[index]], [wishes[index]], 512)
        assert alone == [together[index]]
