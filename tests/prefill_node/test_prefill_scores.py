"""Prompt log-probabilities on the prefill node: every token once, none from the prefix cache, before token 0."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from prefill_bench import ROUTER, SETTINGS, PrefillBench, key, make_submit, of_kind, sent_to

from cluster.request import SamplingParams, TokenLogprobs
from cluster.wire import Cancel, Cancelled, Failed, PeerDown, PromptLogprobs, Token0
from engine.instructions import Push, Send
from engine.step import SampledToken, ScoredTokens, StepPlan, StepResult
from prefill_node import handoff


def submit_scored(bench: PrefillBench, prompt_len: int, name: str = "r", num_choices: int = 1) -> None:
    sampling = SamplingParams(max_tokens=1, num_choices=num_choices)
    submit = make_submit(prompt_len, name=name, max_tokens=1)
    bench.message(msgspec.structs.replace(submit, sampling=sampling, num_prompt_logprobs=2))


def result_of(plan: StepPlan) -> StepResult:
    """What the engine would give: a score for each target, told by its token id."""
    scored = tuple(
        ScoredTokens(chunk.key, tuple(TokenLogprobs(-float(token_id)) for token_id in chunk.targets))
        for chunk in plan.chunks
        if chunk.targets
    )
    tokens = tuple(
        SampledToken(chunk.key, 9, choice=choice)
        for chunk in plan.chunks
        if chunk.sampling is not None
        for choice in range(chunk.sampling.num_choices)
    )
    return StepResult(tokens, (), 0.1, scored)


@pytest.mark.parametrize("prompt_len", [1, 2, 7, 8, 9, 10, 16, 17])
def test_every_token_but_the_first_has_its_score(bench: PrefillBench, prompt_len: int) -> None:
    submit_scored(bench, prompt_len)
    said: list[object] = []
    while bench.states():
        said += sent_to(bench.finish_with(result_of(bench.plan())), ROUTER)
    scores = [message for message in said if isinstance(message, PromptLogprobs)]
    assert isinstance(said[-1], Token0)
    assert said[:-1] == scores
    found = {message.start + place: one.chosen for message in scores for place, one in enumerate(message.logprobs)}
    assert found == {token_id: -float(token_id) for token_id in range(1, prompt_len)}  # tokens are 0, 1, 2 …
    assert sum(len(message.logprobs) for message in scores) == prompt_len - 1


@pytest.mark.parametrize("prompt_len", [1, 8, 9, 17])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_scoring_alone_draws_and_sends_nothing(bench: PrefillBench, prompt_len: int, num_choices: int) -> None:
    sampling = SamplingParams(max_tokens=0, num_choices=num_choices)
    submit = msgspec.structs.replace(make_submit(prompt_len), sampling=sampling, num_prompt_logprobs=2, ticket=None)
    said = bench.message(submit)
    while bench.states():
        plan = bench.plan()
        assert [chunk.sampling for chunk in plan.chunks] == [None]
        said += bench.finish_with(result_of(plan))
    assert {each.peer for each in said if isinstance(each, Send)} == {ROUTER}
    (*scores, token0) = sent_to(said, ROUTER)
    assert sum(len(score.logprobs) for score in scores if isinstance(score, PromptLogprobs)) == prompt_len - 1
    assert token0 == Token0(submit.key, (), 0, 0.0, 0.0)
    assert of_kind(said, Push) == []
    assert bench.pool.num_free == SETTINGS.num_blocks


def test_scoring_alone_may_fill_the_context() -> None:
    settings = dataclasses.replace(SETTINGS, max_model_len=16)
    for max_tokens, prompt_len, refused in ((0, 16, False), (0, 17, True), (1, 16, True)):
        bench = PrefillBench(settings)
        submit = make_submit(prompt_len, max_tokens=max_tokens)
        out = bench.message(msgspec.structs.replace(submit, ticket=submit.ticket if max_tokens else None))
        assert bool(of_kind(out, Failed)) == refused


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_ticket_is_for_what_is_generated(bench: PrefillBench, max_tokens: int) -> None:
    submit = make_submit(9, max_tokens=max_tokens)
    out = bench.message(submit if max_tokens == 0 else msgspec.structs.replace(submit, ticket=None))
    assert [failed.code for failed in of_kind(out, Failed)] == ["node_state"]
    assert bench.states() == {}


@pytest.mark.parametrize("end", ["cancel", "deadline", "engine", "peer"])
def test_scoring_alone_ends_early_too(bench: PrefillBench, end: str) -> None:
    submit = msgspec.structs.replace(make_submit(9, max_tokens=0), ticket=None, num_prompt_logprobs=0)
    bench.message(submit)
    plan = bench.plan()
    match end:
        case "cancel":
            out = bench.message(Cancel(submit.key)) + bench.finish_with(result_of(plan))
            assert [type(said) for said in sent_to(out, ROUTER)] == [Cancelled]
        case "deadline":
            out = bench.tick(61.0) + bench.finish_with(result_of(plan))
            assert [type(said) for said in sent_to(out, ROUTER)] == [Failed]
        case "engine":
            out = bench.finish(plan, failed=["r"])
            assert [type(said) for said in sent_to(out, ROUTER)] == [Failed]
        case _:  # whoever is lost, it is nobody that this request needs
            out = bench.message(PeerDown("D", 7)) + bench.finish_with(result_of(plan))
            out += bench.finish_with(result_of(bench.plan()))
            assert [type(said) for said in sent_to(out, ROUTER)] == [PromptLogprobs, Token0]
    assert {each.peer for each in out if isinstance(each, Send)} == {ROUTER}
    assert bench.states() == {}
    assert bench.pool.num_free == SETTINGS.num_blocks


def test_c7_cached_blocks_are_computed_again(bench: PrefillBench) -> None:
    for name in ("a", "b"):
        submit_scored(bench, 10, name)
        plan = bench.plan()
        assert (plan.chunks[0].start, len(plan.chunks[0].targets), plan.chunks[0].num_target_logprobs) == (0, 8, 2)
        bench.finish_with(result_of(plan))
        out = bench.finish_with(result_of(bench.plan()))
        assert of_kind(out, Token0)[0].cached_tokens == 0
    bench.submit(10, max_tokens=1)
    plan = bench.plan()
    assert (plan.chunks[0].start, plan.chunks[0].targets) == (8, ())  # others find what was computed
    bench.finish(plan)


def test_choices_share_one_set_of_scores(bench: PrefillBench) -> None:
    submit_scored(bench, 8, num_choices=3)
    *scores, token0 = sent_to(bench.finish_with(result_of(bench.plan())), ROUTER)
    assert [(type(message), message.start, len(message.logprobs)) for message in scores] == [(PromptLogprobs, 1, 7)]  # type: ignore[attr-defined]
    assert isinstance(token0, Token0)
    assert [first.choice for first in token0.choices] == [0, 1, 2]


def test_long_scores_go_in_several_messages(bench: PrefillBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_LOGPROBS_A_MESSAGE", 3)
    submit_scored(bench, 8)
    scores = of_kind(bench.finish_with(result_of(bench.plan())), PromptLogprobs)
    assert [(message.start, len(message.logprobs)) for message in scores] == [(1, 3), (4, 3), (7, 1)]


def test_a_failed_step_gives_no_scores(bench: PrefillBench) -> None:
    submit_scored(bench, 8)
    bench.plan()
    out = bench.finish_with(StepResult((), ((key(), "the model's output is not finite"),), 0.1))  # type: ignore[arg-type]
    assert of_kind(out, PromptLogprobs) == []
    assert len(of_kind(out, Failed)) == 1
