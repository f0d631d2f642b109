"""Tokens of several choices put in order, whoever was faster; a gap or a foreign choice is an error."""

from __future__ import annotations

import random

import pytest

from cluster.errors import TransferError
from cluster.request import FinishReason, RequestId, RequestKey, SamplingParams, TokenLogprobs
from cluster.wire import FirstToken, PromptLogprobs, Token0, TokenItem
from router.generation import TokenDelta
from router.relay import TokenOrder

KEY = RequestKey(RequestId("r"), 1)


def order(num_choices: int = 3, first: int = 0) -> TokenOrder:
    return TokenOrder(SamplingParams(max_tokens=9, num_choices=num_choices, choice=first))


def token0(*ends: FinishReason | None, first: int = 0) -> Token0:
    return Token0(KEY, tuple(FirstToken(first + i, 100 + i, end) for i, end in enumerate(ends)), 7, 0.0, 0.0)


def item(choice: int, index: int, end: FinishReason | None = None, token_id: int = 5) -> TokenItem:
    return TokenItem(KEY, index, (token_id,), end, choice=choice)


def test_first_tokens_come_in_order_and_the_prompts_count_once() -> None:
    tokens = order(2, first=4)
    logprobs = TokenLogprobs(-1.0)
    message = Token0(KEY, (FirstToken(4, 8, "stop", logprobs), FirstToken(5, 9, None)), 7, 0.0, 0.0)
    assert not tokens.started
    assert list(tokens.take(message)) == [
        TokenDelta((8,), "stop", 7, (logprobs,), 0),
        TokenDelta((9,), None, None, (), 1),
    ]
    assert (tokens.started, tokens.over) == (True, False)
    assert list(tokens.take(item(5, 1, "length"))) == [TokenDelta((5,), "length", choice=1)]
    assert (tokens.over, tokens.complete) == (True, True)


def test_where_nothing_is_generated_every_choice_ends_with_the_scores_of_the_prompt() -> None:
    tokens = TokenOrder(SamplingParams(max_tokens=0, num_choices=2))
    scores = (TokenLogprobs(-1.0, rank=3), TokenLogprobs(-2.0, rank=1))
    assert list(tokens.take(PromptLogprobs(KEY, 1, scores))) == []
    assert not tokens.over
    assert list(tokens.take(Token0(KEY, (), 7, 0.0, 0.0))) == [
        TokenDelta((), "length", 7, prompt_logprobs=scores),
        TokenDelta((), "length", choice=1),
    ]
    assert tokens.complete
    for asked, message in ((0, token0(None)), (9, Token0(KEY, (), 7, 0.0, 0.0))):
        with pytest.raises(TransferError, match="other first tokens"):
            list(TokenOrder(SamplingParams(max_tokens=asked)).take(message))


def test_tokens_before_token_0_wait_for_it() -> None:
    tokens = order(2)
    assert list(tokens.take(item(1, 1))) == list(tokens.take(item(0, 1))) == []
    got = list(tokens.take(token0(None, None)))
    assert [(delta.choice, delta.token_ids) for delta in got] == [(0, (100,)), (1, (101,)), (1, (5,)), (0, (5,))]


def test_any_order_between_choices_is_right() -> None:
    items = {choice: [item(choice, i, "length" if i == 5 else None, i) for i in range(1, 6)] for choice in range(3)}
    rng = random.Random(1)
    for _ in range(20):
        tokens, got = order(), {choice: [] for choice in range(3)}
        list(tokens.take(token0(None, None, None)))
        left = {choice: list(theirs) for choice, theirs in items.items()}
        while any(left.values()):
            choice = rng.choice([choice for choice, theirs in left.items() if theirs])
            for delta in tokens.take(left[choice].pop(0)):
                got[delta.choice] += delta.token_ids
        assert got == {choice: [1, 2, 3, 4, 5] for choice in range(3)}
        assert tokens.complete


@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_gap_in_one_choice_is_an_error(index: int) -> None:
    tokens = order()
    list(tokens.take(token0(None, None, None)))
    list(tokens.take(item(0, 1)))
    with pytest.raises(TransferError):
        list(tokens.take(item(1, index)))


@pytest.mark.parametrize("choice", [3, 100])
def test_a_foreign_choice_is_an_error(choice: int) -> None:
    tokens = order()
    list(tokens.take(token0(None, None, None)))
    with pytest.raises(TransferError):
        list(tokens.take(item(choice, 1)))


@pytest.mark.parametrize("message", [token0(None), token0(None, None, None, None), token0(None, None, None, first=1)])
def test_other_first_tokens_than_asked_for_are_an_error(message: Token0) -> None:
    with pytest.raises(TransferError):
        list(order().take(message))


def test_a_second_token_0_is_an_error() -> None:
    tokens = order()
    list(tokens.take(token0(None, None, None)))
    with pytest.raises(TransferError):
        list(tokens.take(token0(None, None, None)))


def test_nothing_follows_of_a_choice_the_reader_ended() -> None:
    tokens = order(2)
    list(tokens.take(item(0, 1)))
    got = tokens.take(token0(None, None))
    assert [(delta.choice, delta.token_ids) for delta in got] == [(0, (100,)), (1, (101,)), (0, (5,))]
    tokens.drop(0)
    assert list(tokens.take(item(0, 2))) == []  # the decode node did not know yet
    assert list(tokens.take(item(1, 1, "stop"))) == [TokenDelta((5,), "stop", choice=1)]
    assert (tokens.over, tokens.complete) == (True, False), "the decode node may not have heard: cancel it"


def test_the_reader_ends_all() -> None:
    tokens = order(2)
    list(tokens.take(token0(None, None)))
    tokens.drop(1)
    assert not tokens.over
    tokens.drop(0)
    assert (tokens.over, tokens.complete) == (True, False)


def test_ending_what_has_ended_cuts_nothing() -> None:
    tokens = order(1)
    list(tokens.take(token0("stop")))
    tokens.drop(0)
    assert tokens.complete


def scores(start: int, *values: float) -> PromptLogprobs:
    return PromptLogprobs(KEY, start, tuple(map(TokenLogprobs, values)))


def test_the_prompts_logprobs_come_once_with_token_0_of_choice_0() -> None:
    tokens = order(2)
    assert list(tokens.take(scores(1, -1.0, -2.0))) == list(tokens.take(scores(3, -3.0))) == []
    assert not tokens.started
    first, second = tokens.take(token0(None, "stop"))
    assert [one.chosen for one in first.prompt_logprobs] == [-1.0, -2.0, -3.0]
    assert (second.choice, second.prompt_logprobs) == (1, ())
    (later,) = tokens.take(item(0, 1))
    assert later.prompt_logprobs == ()


def test_the_prompts_logprobs_after_token_0_are_an_error() -> None:
    tokens = order()
    list(tokens.take(scores(1, -1.0)))
    list(tokens.take(token0(None, None, None)))
    with pytest.raises(TransferError):
        list(tokens.take(scores(2, -1.0)))
