from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from tiny_model import CONFIG, tensors  # noqa: E402

from cluster.request import RequestId, RequestKey, SamplingParams  # noqa: E402
from engine.kv_cache import KVCache  # noqa: E402
from engine.model import LlamaModel  # noqa: E402
from engine.model_config import ModelConfig  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402
from engine.step import SequenceChunk, StepPlan  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.backend import Backend  # noqa: E402

GREEDY = SamplingParams(max_tokens=4)


@pytest.fixture
def runner(tmp_path: Path, ops: Backend) -> ModelRunner:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    config = ModelConfig.from_directory(tmp_path)
    model = LlamaModel(config, load_weights(tmp_path, config, ops))
    return ModelRunner(model, KVCache(model.kv_layout(4), 20))


def key(name: str) -> RequestKey:
    return RequestKey(RequestId(name), 0)


def chunk(
    name: str,
    token_ids: list[int],
    table: list[int],
    *,
    start: int = 0,
    sampling: SamplingParams | None = GREEDY,
) -> SequenceChunk:
    return SequenceChunk(key(name), token_ids, start, table, sampling, start + len(token_ids))


def test_results_come_in_the_order_of_the_plan(runner: ModelRunner) -> None:
    chunks = (chunk("b", [1, 2, 3], [4]), chunk("quiet", [5], [9], sampling=None), chunk("a", [4], [7]))
    result = runner.execute(StepPlan(chunks))
    assert [token.key.request_id for token in result.tokens] == ["b", "a"]
    assert result.failed == ()
    assert result.seconds > 0


def test_empty_plan(runner: ModelRunner) -> None:
    result = runner.execute(StepPlan(()))
    assert (result.tokens, result.failed) == ((), ())


def test_prefill_only_step_samples_nothing(runner: ModelRunner) -> None:
    result = runner.execute(StepPlan((chunk("a", [1, 2], [0], sampling=None),)))
    assert (result.tokens, result.failed) == ((), ())
    assert runner.cache.pool[0, :, :, :, :2].abs().sum() > 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (chunk("bad", [20], [1]), "vocabulary of 20"),
        (chunk("bad", [-1], [1]), "vocabulary"),
        (chunk("bad", [1] * 65, list(range(1, 19))), "64 positions"),
        (chunk("bad", [1] * 5, [1]), "block table"),
        (chunk("bad", [1], [20]), "block table"),
        (chunk("bad", [1], [-1]), "block table"),
    ],
)
def test_a_bad_chunk_fails_alone(runner: ModelRunner, bad: SequenceChunk, message: str) -> None:
    good = chunk("good", [1, 2, 3], [0])
    alone = runner.execute(StepPlan((good,))).tokens
    result = runner.execute(StepPlan((bad, good)))
    assert result.tokens == alone
    assert [failure.key for failure in result.failed] == [bad.key]
    assert message in result.failed[0].message


def test_bad_chunks_that_sample_nothing_fail_too(runner: ModelRunner) -> None:
    result = runner.execute(StepPlan((chunk("bad", [99], [1], sampling=None),)))
    assert [failure.key for failure in result.failed] == [key("bad")]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poisoned_cache_fails_its_owner_only(runner: ModelRunner, poison: float) -> None:
    runner.execute(StepPlan((chunk("a", [1, 2, 3], [5]), chunk("b", [4, 5, 6], [6]))))
    steps = (chunk("a", [7], [5], start=3), chunk("b", [8], [6], start=3))
    clean = runner.execute(StepPlan(steps))
    runner.cache.pool[5, 0, 1, :, 1] = poison
    result = runner.execute(StepPlan(steps))
    assert result.tokens == clean.tokens[1:]
    assert [failure.key for failure in result.failed] == [key("a")]
    assert "finite" in result.failed[0].message


def test_stale_bytes_in_unused_slots_do_not_matter(runner: ModelRunner) -> None:
    wanted = runner.execute(StepPlan((chunk("a", [1, 2], [3]),))).tokens
    runner.cache.pool.fill_(float("nan"))
    assert runner.execute(StepPlan((chunk("a", [1, 2], [3]),))).tokens == wanted


def test_shared_prefix_blocks_serve_both_sharers(runner: ModelRunner) -> None:
    prefix = [1, 2, 3, 4]
    runner.execute(StepPlan((chunk("a", prefix, [2], sampling=None),)))
    shared = runner.execute(StepPlan((chunk("a", [5, 6], [2, 8], start=4), chunk("b", [7], [2, 9], start=4))))
    alone = runner.execute(StepPlan((chunk("a", [*prefix, 5, 6], [10, 11]), chunk("b", [*prefix, 7], [12, 13]))))
    assert shared.tokens == alone.tokens


@pytest.mark.parametrize("num_tokens", [1, 7, 10_000])
def test_warm_up_leaves_the_pool_clear(runner: ModelRunner, num_tokens: int) -> None:
    assert runner.warm_up(num_tokens) > 0
    assert not runner.cache.as_bytes().any()


def test_steps_within_what_is_reserved_make_no_buffer(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.model.reserve(100, 80)
    made: list[tuple[object, ...]] = []
    real = torch.empty

    def empty(*size: int, **options: object) -> torch.Tensor:
        made.append(size)
        return real(*size, **options)

    monkeypatch.setattr("engine.model.torch.empty", empty)
    runner.execute(StepPlan(tuple(chunk(str(i), [1], [i % 20]) for i in range(70))))
    assert made == []
    runner.execute(StepPlan(tuple(chunk(str(i), [1], [i % 20]) for i in range(130))))
    assert made
