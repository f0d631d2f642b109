"""Log-probabilities of a prompt's own tokens, computed with its chunks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from stepping import all_logits  # noqa: E402
from tiny_model import CONFIG, tensors  # noqa: E402

from cluster.request import RequestId, RequestKey, SamplingParams, TokenLogprobs  # noqa: E402
from engine import runner as runner_module  # noqa: E402
from engine.kv_cache import KVCache  # noqa: E402
from engine.model import LlamaModel  # noqa: E402
from engine.model_config import ModelConfig  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.step import SequenceChunk, StepPlan  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402

GREEDY = SamplingParams(max_tokens=4)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


@pytest.fixture
def runner(tmp_path: Path, ops: Backend) -> ModelRunner:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    config = ModelConfig.from_directory(tmp_path)
    model = LlamaModel(config, load_weights(tmp_path, config, ops))
    return ModelRunner(model, KVCache(model.kv_layout(4), 20))


def chunk(
    start: int, end: int, *, name: str = "a", table: tuple[int, ...] = (3, 0, 7, 5), num_top: int = 2
) -> SequenceChunk:
    return SequenceChunk(
        RequestKey(RequestId(name), 0),
        PROMPT[start:end],
        start,
        table,
        GREEDY if end == len(PROMPT) else None,
        end,
        targets=PROMPT[start + 1 : end + 1],
        num_target_logprobs=num_top,
    )


@pytest.mark.parametrize("rows_at_once", [1, 3, 32])
@pytest.mark.parametrize("chunk_len", [1, 4, 6, 15])
def test_c8_values_are_log_softmax_whatever_the_chunks(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, chunk_len: int, rows_at_once: int
) -> None:
    monkeypatch.setattr(runner_module, "_SCORED_ROWS", rows_at_once)
    wanted = all_logits(runner, PROMPT, len(PROMPT), random.Random(2)).log_softmax(-1)
    found: list[TokenLogprobs] = []
    other = SequenceChunk(RequestKey(RequestId("b"), 0), [2, 2], 0, (19,), GREEDY, 2)
    for start in range(0, len(PROMPT), chunk_len):
        # Others in the batch, before and after, move the rows and change nothing.
        chunks = (other, chunk(start, min(start + chunk_len, len(PROMPT))))
        result = runner.execute(StepPlan(chunks))
        assert not result.failed
        for scores in result.scored:
            assert scores.key.request_id == "a"
            found += scores.logprobs
    assert len(found) == len(PROMPT) - 1
    for place, one in enumerate(found):
        assert one.chosen == pytest.approx(wanted[place, PROMPT[place + 1]].item(), abs=1e-4)
        assert [token_id for token_id, _ in one.top] == wanted[place].topk(2).indices.tolist()
        assert one.rank == wanted[place].argsort(descending=True).tolist().index(PROMPT[place + 1]) + 1
        if PROMPT[place + 1] in dict(one.top):
            assert dict(one.top)[PROMPT[place + 1]] == one.chosen


def test_scoring_leaves_the_sampled_tokens_alone(runner: ModelRunner) -> None:
    plain = SequenceChunk(RequestKey(RequestId("a"), 0), PROMPT, 0, (3, 0, 7, 5), GREEDY, len(PROMPT))
    assert runner.execute(StepPlan((plain,))).tokens == runner.execute(StepPlan((chunk(0, len(PROMPT)),))).tokens
    assert runner.execute(StepPlan((plain,))).scored == ()


def test_choices_share_the_scores_of_their_prompt(runner: ModelRunner) -> None:
    alone = runner.execute(StepPlan((chunk(0, len(PROMPT)),)))
    for temperature in (0.0, 5.0):
        sampling = SamplingParams(max_tokens=4, num_choices=3, temperature=temperature, seed=1, num_logprobs=1)
        several = replace(chunk(0, len(PROMPT)), sampling=sampling)
        other = chunk(0, 4, name="b", table=(19,))
        result = runner.execute(StepPlan((other, several)))
        assert [(token.key.request_id, token.choice) for token in result.tokens] == [("a", 0), ("a", 1), ("a", 2)]
        (of_other, scores) = result.scored
        assert (of_other.key.request_id, scores.key.request_id) == ("b", "a")
        assert [one.chosen for one in scores.logprobs] == pytest.approx(
            [one.chosen for one in alone.scored[0].logprobs], abs=1e-4
        )


def test_a_target_outside_the_vocabulary_fails_alone(runner: ModelRunner) -> None:
    bad = SequenceChunk(RequestKey(RequestId("bad"), 0), [1, 2], 0, (1,), None, 2, targets=[2, 20])
    result = runner.execute(StepPlan((bad, chunk(0, 4))))
    assert [failure.key for failure in result.failed] == [bad.key]
    assert [scores.key.request_id for scores in result.scored] == ["a"]
    with pytest.raises(ValueError, match="targets"):
        SequenceChunk(bad.key, [1], 0, (1,), None, 1, targets=[1, 2])


def test_logits_that_are_not_finite_fail_their_sequence(runner: ModelRunner) -> None:
    runner.execute(StepPlan((chunk(0, 4),)))
    runner.cache.pool[3, 0, 1, :, 1] = float("nan")
    good = chunk(0, 4, name="good", table=(9,))
    result = runner.execute(StepPlan((chunk(4, 8), good)))
    assert [failure.key.request_id for failure in result.failed] == ["a"]
    assert [scores.key.request_id for scores in result.scored] == ["good"]
