from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from cluster.request import LOGPROB_FLOOR, MAX_LOGPROBS, SamplingParams, TokenLogprobs  # noqa: E402
from engine.logprobs import token_logprobs  # noqa: E402
from engine.sampler import Choice, Draw, choose  # noqa: E402


def random_logits(num_rows: int, vocab_size: int, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(11)) * spread


@pytest.mark.parametrize("vocab_size", [1, 5, 20, 21, 700, 7001])
def test_values_are_those_of_log_softmax(vocab_size: int) -> None:
    logits = random_logits(6, vocab_size)
    wanted = logits.double().log_softmax(-1)
    chosen = [row % vocab_size for row in range(6)]
    counts = [0, 1, 2, 5, 19, MAX_LOGPROBS]
    for row, got in enumerate(token_logprobs(logits.numpy(), chosen, counts)):
        assert got.chosen == pytest.approx(wanted[row, chosen[row]].item(), abs=2e-5)
        order = wanted[row].argsort(descending=True)[: counts[row]]
        assert [token_id for token_id, _ in got.top] == order.tolist()
        assert [value for _, value in got.top] == pytest.approx(wanted[row, order].tolist(), abs=2e-5)


def test_the_chosen_tokens_value_is_exactly_its_entry() -> None:
    logits = random_logits(200, 3000, spread=0.5)
    likeliest = [token_id for row in token_logprobs(logits.numpy(), [0] * 200, [3] * 200) for token_id, _ in row.top]
    for place in range(3):
        chosen = likeliest[place::3]
        for token_id, got in zip(chosen, token_logprobs(logits.numpy(), chosen, [20] * 200), strict=True):
            assert got.chosen == dict(got.top)[token_id]


def test_equals_come_by_ascending_id() -> None:
    (got,) = token_logprobs(torch.zeros(1, 15).numpy(), [3], [20])
    assert [token_id for token_id, _ in got.top] == list(range(15))
    logits = torch.zeros(1, 15)
    logits[0, 9] = 1
    (got,) = token_logprobs(logits.numpy(), [3], [4])
    assert [token_id for token_id, _ in got.top] == [9, 0, 1, 2]


def test_ranks_count_those_that_are_at_least_as_likely() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0]] * 5)
    found = token_logprobs(logits.numpy(), range(5), [1] * 5, ranked=True)
    assert [one.rank for one in found] == [1, 4, 2, 4, 5]
    assert [one.rank for one in token_logprobs(logits.numpy(), range(5), [1] * 5)] == [0] * 5


def test_no_infinity_reaches_the_client() -> None:
    logits = torch.tensor([[0.0, -1e6, -3e38, 1.0]])
    (got,) = token_logprobs(logits.numpy(), [2], [4])
    assert got.chosen == LOGPROB_FLOOR
    assert [value for _, value in got.top[2:]] == [LOGPROB_FLOOR, LOGPROB_FLOOR]
    json.dumps([got.chosen, got.top], allow_nan=False)


def test_they_are_of_the_models_own_distribution() -> None:
    """Whatever temperature, penalties, bias and filters do: vLLM's default."""
    logits = random_logits(1, 50)
    best = int(logits.argmax())
    plain = token_logprobs(logits.numpy(), [7], [20])[0]
    sampling = SamplingParams(
        max_tokens=1, temperature=0.5, top_p=0.5, banned_token_ids=(best,), allowed_token_ids=(7, best), num_logprobs=20
    )
    assert choose(logits, [Draw(sampling, 3)]) == [Choice(7, plain)]


def test_only_rows_that_ask_get_any() -> None:
    logits = random_logits(4, 500)
    wishes = [None, 0, 2, None]
    got = choose(logits, [Draw(SamplingParams(max_tokens=1, num_logprobs=wish), 3) for wish in wishes])
    logprobs = [choice.logprobs for choice in got if isinstance(choice, Choice)]
    assert [each is not None for each in logprobs] == [False, True, True, False]
    assert isinstance(logprobs[1], TokenLogprobs)
    assert logprobs[1].top == ()
    assert isinstance(logprobs[2], TokenLogprobs)
    assert len(logprobs[2].top) == 2
    assert logprobs[2].chosen == logprobs[2].top[0][1], "a greedy token is the likeliest"
