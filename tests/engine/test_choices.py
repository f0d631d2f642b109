"""Several choices of one prompt: each gets the bits it would get alone, from one row of logits and copied blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from tiny_model import CONFIG, tensors  # noqa: E402

from cluster.request import RequestId, RequestKey, SamplingParams  # noqa: E402
from engine.history import TokenHistory  # noqa: E402
from engine.kv_cache import KVCache  # noqa: E402
from engine.model import LlamaModel  # noqa: E402
from engine.model_config import ModelConfig  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.step import BlockCopy, SampledToken, SequenceChunk, StepPlan  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402

KEY = RequestKey(RequestId("r"), 0)
BLOCK_SIZE = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5, "num_logprobs": 3},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 9, "seed": -4, "choice": 2, "num_logprobs": 0},
    {"temperature": 0.9, "seed": 9, "frequency_penalty": 1.1, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.5, "min_tokens": 3, "stop_token_ids": (1, 2, 3)},
]


@pytest.fixture
def runner(tmp_path: Path, ops: Backend) -> ModelRunner:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    config = ModelConfig.from_directory(tmp_path)
    model = LlamaModel(config, load_weights(tmp_path, config, ops))
    return ModelRunner(model, KVCache(model.kv_layout(BLOCK_SIZE), 40))


def generate(runner: ModelRunner, prompt: list[int], sampling: SamplingParams) -> dict[int, list[SampledToken]]:
    """All choices as nodes do it: one prefill, token 0 of each, then a fork with copies of the partial block."""
    num_full, size = len(prompt) // BLOCK_SIZE, -(-(len(prompt) + sampling.max_tokens) // BLOCK_SIZE)
    history = TokenHistory.of_sequence(sampling, prompt, 0)
    table = list(range(size))
    result = runner.execute(StepPlan((SequenceChunk(KEY, prompt, 0, table, sampling, len(prompt), 0, history),)))
    assert result.failed == ()
    found = {token.choice: [token] for token in result.tokens}
    assert list(found) == [each.choice for each in sampling.choices()]
    tables = {
        choice: table[:num_full] + [size * (number + 1) + i for i in range(size - num_full)]
        for number, choice in enumerate(found)
    }
    copies = [BlockCopy(num_full, tables[choice][num_full]) for choice in found] if len(prompt) % BLOCK_SIZE else []
    for num_generated in range(1, sampling.max_tokens):
        position = len(prompt) + num_generated
        chunks = []
        for each in sampling.choices():
            tokens = [token.token_id for token in found[each.choice]]
            history = TokenHistory.of_sequence(sampling, prompt + tokens, num_generated)
            table = tables[each.choice]
            chunks.append(SequenceChunk(KEY, tokens[-1:], position - 1, table, each, position, num_generated, history))
        result = runner.execute(StepPlan(tuple(chunks), tuple(copies)))
        assert result.failed == ()
        copies = []
        for token in result.tokens:
            found[token.choice].append(token)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("prompt_len", [3, 4, 5, 15, 16, 17])
def test_choice_j_of_four_is_choice_j_alone(
    runner: ModelRunner, ops: Backend, prompt_len: int, options: dict[str, Any]
) -> None:
    prompt = [(i * i + 3) % 20 for i in range(prompt_len)]
    sampling = SamplingParams(max_tokens=9, num_choices=4, **options)
    together = generate(runner, prompt, sampling)
    for alone in sampling.choices():
        runner.cache.pool.zero_()
        (tokens,) = generate(runner, prompt, alone).values()
        assert [token.token_id for token in tokens] == [token.token_id for token in together[alone.choice]]
        if ops.name == "native":  # the others do not promise bits, whatever the batch
            assert tokens == together[alone.choice]
    different = {tuple(token.token_id for token in tokens) for tokens in together.values()}
    assert (len(different) == 1) == sampling.greedy


def test_greedy_choices_share_one_draw_and_their_logprobs(runner: ModelRunner) -> None:
    sampling = SamplingParams(max_tokens=1, num_choices=128, num_logprobs=2)
    other = SamplingParams(max_tokens=1, temperature=1.0, seed=3, choice=7, num_choices=3)
    chunks = (
        SequenceChunk(KEY, [1, 2, 3], 0, [0], sampling, 3),
        SequenceChunk(RequestKey(RequestId("quiet"), 0), [4], 0, [1], None, 1),
        SequenceChunk(RequestKey(RequestId("other"), 0), [5, 6], 0, [2], other, 2),
    )
    result = runner.execute(StepPlan(chunks))
    assert [token.choice for token in result.tokens] == [*range(128), 7, 8, 9]
    assert len({(token.token_id, token.logprobs) for token in result.tokens[:128]}) == 1


def test_what_leaves_no_token_fails_every_choice(runner: ModelRunner) -> None:
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_tokens=1, temperature=temperature, num_choices=3, allowed_token_ids=(99,))
        result = runner.execute(StepPlan((SequenceChunk(KEY, [1, 2], 0, [0], sampling, 2),)))
        assert result.tokens == ()
        assert {failure.key for failure in result.failed} == {KEY}


def test_copies_come_before_anything_is_written(runner: ModelRunner) -> None:
    """The source is written in the same step: the copy must hold what it held before."""
    first = SequenceChunk(KEY, [1, 2], 0, [0], None, 2)
    runner.execute(StepPlan((first,)))
    before = runner.cache.pool[0].clone()
    writing = SequenceChunk(KEY, [3], 2, [0], SamplingParams(max_tokens=1), 3)
    runner.execute(StepPlan((writing,), (BlockCopy(0, 5), BlockCopy(0, 6))))
    assert torch.equal(runner.cache.pool[5], before)
    assert torch.equal(runner.cache.pool[6], before)
    assert not torch.equal(runner.cache.pool[0], before)


def test_asking_for_several_changes_nothing_else() -> None:
    alone = SamplingParams(max_tokens=3, seed=4, choice=6)
    assert msgspec.structs.replace(alone, num_choices=2).choices()[0] == alone
