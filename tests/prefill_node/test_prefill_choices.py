"""Several choices of one prompt on the prefill node: token 0 of each from one step, and who goes on."""

from __future__ import annotations

import msgspec
import pytest
from prefill_bench import DECODE, ROUTER, PrefillBench, key, make_submit, of_kind, sent_to

from cluster.request import SamplingParams, TokenLogprobs
from cluster.wire import (
    Acknowledged,
    Cancel,
    Cancelled,
    Commit,
    Failed,
    FirstToken,
    PenaltyCounts,
    StartedChoice,
    Submit,
    Token0,
)
from engine.instructions import Instruction, Push
from engine.step import SampledToken, StepResult


def submit_of(num_choices: int, prompt: int = 6, **options: object) -> Submit:
    sampling = SamplingParams(**{"max_tokens": 5, "num_choices": num_choices, **options})  # type: ignore[arg-type]
    return msgspec.structs.replace(make_submit(prompt), sampling=sampling)


def finish_each(bench: PrefillBench, tokens: list[int], first: int = 0) -> list[Instruction]:
    """Choice ``first + i`` gets ``tokens[i]``."""
    sampled = tuple(SampledToken(key(), token_id, choice=first + i) for i, token_id in enumerate(tokens))
    return bench.finish_with(StepResult(sampled, (), 0.1))


def acknowledge(bench: PrefillBench, *indexes: int) -> None:
    bench.sent("r", *indexes)
    bench.message(Acknowledged(key()), DECODE)
    assert bench.states() == {}


def test_the_prompt_is_computed_and_sent_once(bench: PrefillBench) -> None:
    bench.message(submit_of(3))
    (chunk,) = bench.plan().chunks
    assert chunk.sampling is not None
    assert chunk.sampling.num_choices == 3
    out = finish_each(bench, [7, 8, 9])
    (token0,) = of_kind(out, Token0)
    assert token0.choices == (FirstToken(0, 7, None), FirstToken(1, 8, None), FirstToken(2, 9, None))
    assert [len(push.items) for push in of_kind(out, Push)] == [2]
    (commit,) = of_kind(out, Commit)
    assert commit.capsule.choices == (StartedChoice(0, 7), StartedChoice(1, 8), StartedChoice(2, 9))
    assert bench.state.counters()["prefill_computed_tokens_total"] == 6
    acknowledge(bench, 0, 1)


@pytest.mark.parametrize("first", [0, 5])
def test_choices_that_token_0_ends_stay_here(bench: PrefillBench, first: int) -> None:
    bench.message(submit_of(3, stop_token_ids=(8,), choice=first))
    bench.plan()
    out = finish_each(bench, [7, 8, 9], first)
    (token0,) = of_kind(out, Token0)
    assert [(each.choice, each.finish_reason) for each in token0.choices] == [
        (first, None),
        (first + 1, "stop"),
        (first + 2, None),
    ]
    (commit,) = of_kind(out, Commit)
    assert commit.capsule.choices == (StartedChoice(first, 7), StartedChoice(first + 2, 9))
    acknowledge(bench, 0, 1)


@pytest.mark.parametrize(
    ("options", "reason"), [({"max_tokens": 1}, "length"), ({"stop_token_ids": (7, 8)}, "stop")], ids=["length", "stop"]
)
def test_if_token_0_ends_all_the_decode_node_never_runs(
    bench: PrefillBench, options: dict[str, object], reason: str
) -> None:
    bench.message(submit_of(3, **options))
    bench.plan()
    out = finish_each(bench, [7, 8, 7])
    assert [each.finish_reason for each in of_kind(out, Token0)[0].choices] == [reason] * 3
    assert of_kind(out, Commit) == of_kind(out, Push) == []
    assert sent_to(out, DECODE) == [Cancelled(key(), blocks_freed=2, blocks_sent=0)]
    assert bench.states() == {}


def test_each_token_has_its_own_logprobs(bench: PrefillBench) -> None:
    bench.message(submit_of(2, max_tokens=1, num_logprobs=1))
    bench.plan()
    logprobs = [TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-2.0, ((7, -0.5),))]
    sampled = tuple(SampledToken(key(), 7 + i, logprobs[i], i) for i in range(2))
    (token0,) = of_kind(bench.finish_with(StepResult(sampled, (), 0.1)), Token0)
    assert [each.logprobs for each in token0.choices] == logprobs


def test_penalties_of_choices_begin_alike(bench: PrefillBench) -> None:
    bench.message(submit_of(2, prompt=3, repetition_penalty=1.1))
    bench.plan()
    (commit,) = of_kind(finish_each(bench, [7, 8]), Commit)
    assert commit.capsule.penalty_counts == PenaltyCounts((0, 1, 2), ())
    acknowledge(bench, 0)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4])
def test_a_step_with_another_number_of_tokens_is_an_engine_failure(bench: PrefillBench, num_tokens: int) -> None:
    bench.message(submit_of(3))
    bench.plan()
    out = finish_each(bench, list(range(num_tokens)))
    assert [failed.code for failed in of_kind(out, Failed)] == ["engine_error"]
    assert of_kind(out, Token0) == []


def test_choices_cannot_go_on_from_the_tokens_of_one(bench: PrefillBench) -> None:
    out = bench.message(msgspec.structs.replace(submit_of(2), num_emitted=2))
    assert [failed.code for failed in of_kind(out, Failed)] == ["node_state"]


@pytest.mark.parametrize("when", ["queued", "prefilling", "in_step", "sending"])
def test_cancel_ends_all_of_them(bench: PrefillBench, when: str) -> None:
    bench.message(submit_of(3, prompt=10))
    if when != "queued":
        plan = bench.plan()
        if when != "in_step":
            bench.finish(plan)
        if when == "sending":
            bench.step()
    out = bench.message(Cancel(key()))
    if when == "in_step":
        out += bench.finish(plan)
        assert of_kind(out, Token0) == []
    if when != "queued" and when != "in_step":
        out += bench.push_ended(blocks_sent=1)
    assert [each.key for each in of_kind(sent_to(out, ROUTER), Cancelled)] == [key()]  # type: ignore[arg-type]
    assert bench.states() == {}
