"""Two runners, a prefill and a decode one, give the ids of a single one, whatever the options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from tiny_model import CONFIG, tensors  # noqa: E402

from cluster.request import RequestId, RequestKey, SamplingParams, TokenLogprobs  # noqa: E402
from cluster.wire import PenaltyCounts  # noqa: E402
from engine.history import TokenHistory  # noqa: E402
from engine.kv_cache import KVCache  # noqa: E402
from engine.model import LlamaModel  # noqa: E402
from engine.model_config import ModelConfig  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.step import SampledToken, SequenceChunk, StepPlan  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402

KEY = RequestKey(RequestId("r"), 0)
TABLE = [7, 2, 9, 4, 11, 3]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "seed": 5, "choice": 2, "num_logprobs": 3},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.1, "presence_penalty": 0.4, "temperature": 0.8, "seed": 9},
    {
        "repetition_penalty": 0.7,
        "frequency_penalty": -0.6,
        "temperature": 1.3,
        "top_k": 7,
        "seed": 2,
        "num_logprobs": 0,
    },
    {"min_tokens": 9, "stop_token_ids": (0, 1, 2, 3, 4, 5, 6), "presence_penalty": 1.0, "temperature": 1.0},
    {"logit_bias": ((8, 3.0), (2, -100.0)), "banned_token_ids": (9, 10), "repetition_penalty": 1.2, "min_p": 0.1},
]


def new_runner(directory: Path, ops: Backend) -> ModelRunner:
    config = ModelConfig.from_directory(directory)
    model = LlamaModel(config, load_weights(directory, config, ops))
    return ModelRunner(model, KVCache(model.kv_layout(4), 12))


@pytest.fixture
def runners(tmp_path: Path, ops: Backend) -> tuple[ModelRunner, ModelRunner]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return new_runner(tmp_path, ops), new_runner(tmp_path, ops)


def step(runner: ModelRunner, token_ids: list[int], start: int, chunk_options: dict[str, Any]) -> SampledToken:
    chunk = SequenceChunk(KEY, token_ids, start, TABLE, position=start + len(token_ids), **chunk_options)
    # A batch mate with other options, first in the batch: it must not show.
    mate = SequenceChunk(
        RequestKey(RequestId("mate"), 0), [start % 20], 0, [0], SamplingParams(max_tokens=1, temperature=1.0), 1
    )
    result = runner.execute(StepPlan((mate, chunk) if start % 2 else (chunk,)))
    assert not result.failed
    return next(token for token in result.tokens if token.key == KEY)


def colocated(runner: ModelRunner, sampling: SamplingParams) -> list[SampledToken]:
    """One node: what it knows of the sequence is made anew from all of it, for every token."""
    sequence, tokens = list(PROMPT), []
    for num_generated in range(sampling.max_tokens):
        start = len(sequence) - 1 if num_generated else 0
        history = TokenHistory.of_sequence(sampling, sequence, num_generated)
        options = {"sampling": sampling, "num_generated": num_generated, "history": history}
        tokens.append(step(runner, sequence[start:], start, options))
        sequence.append(tokens[-1].token_id)
    return tokens


def split(prefill: ModelRunner, decode: ModelRunner, sampling: SamplingParams) -> list[SampledToken]:
    """Two nodes: the decode node gets the blocks, and the counts as they cross the wire; then it counts itself."""
    history = TokenHistory.of_sequence(sampling, PROMPT, 0)
    tokens = [step(prefill, PROMPT, 0, {"sampling": sampling, "history": history})]
    counts = None
    if history is not None:
        counts = msgspec.msgpack.decode(msgspec.msgpack.encode(history.counts()), type=PenaltyCounts)
    decode.cache.pool.copy_(prefill.cache.pool)
    history = TokenHistory.of_counts(counts)
    if history is not None:
        history.append(tokens[0].token_id)
    for num_generated in range(1, sampling.max_tokens):
        options = {"sampling": sampling, "num_generated": num_generated, "history": history}
        tokens.append(step(decode, [tokens[-1].token_id], len(PROMPT) + num_generated - 1, options))
        if history is not None:
            history.append(tokens[-1].token_id)
    return tokens


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_nodes_choose_what_one_does(runners: tuple[ModelRunner, ModelRunner], options: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=12, **options)
    alone = colocated(runners[0], sampling)
    assert split(*runners, sampling) == alone
    if sampling.min_tokens:
        early = [token.token_id for token in alone[: sampling.min_tokens]]
        assert not set(early) & set(sampling.stop_token_ids)


def test_penalties_do_something(runners: tuple[ModelRunner, ModelRunner]) -> None:
    plain, penalised = (
        [token.token_id for token in colocated(runners[0], SamplingParams(max_tokens=12, presence_penalty=penalty))]
        for penalty in (0.0, 2.0)
    )
    assert plain != penalised
    assert len(set(penalised)) > len(set(plain))


def test_what_options_leave_nothing_of_fails_alone(runners: tuple[ModelRunner, ModelRunner]) -> None:
    impossible = SamplingParams(max_tokens=1, allowed_token_ids=(99,))
    no_history = SamplingParams(max_tokens=1, presence_penalty=1.0)
    fine = SamplingParams(max_tokens=1, num_logprobs=1)
    plan = StepPlan(
        tuple(
            SequenceChunk(RequestKey(RequestId(name), 0), [1, 2], 0, [block], sampling, 2)
            for block, (name, sampling) in enumerate({"a": impossible, "b": fine, "c": no_history}.items())
        )
    )
    result = runners[0].execute(plan)
    assert [(failure.key.request_id, failure.message) for failure in result.failed] == [
        ("a", "the request's options leave no token to choose"),
        ("c", "internal: penalties without the sequence's history"),
    ]
    (token,) = result.tokens
    assert token.key.request_id == "b"
    assert isinstance(token.logprobs, TokenLogprobs)
    assert token.logprobs.top == ((token.token_id, token.logprobs.chosen),)
