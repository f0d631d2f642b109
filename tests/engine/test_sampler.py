"""Which token is chosen: against the dense specification, by statistics, and whatever else is in the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

torch = pytest.importorskip("torch")

from dense_sampler import Before, choose_densely, edited, kept  # noqa: E402

from cluster.request import SamplingParams  # noqa: E402
from engine import race as race_module  # noqa: E402
from engine import sampler as sampler_module  # noqa: E402
from engine.history import TokenHistory  # noqa: E402
from engine.sampler import NO_HISTORY, NOT_FINITE, NOTHING_LEFT, Choice, Draw, choose, sample  # noqa: E402

LARGE = 6500  # candidates are looked for in groups from 3,088 on


def params(temperature: float = 1.0, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=99, temperature=temperature, **options)  # type: ignore[arg-type]


def random_logits(num_rows: int, vocab_size: int, spread: float = 4.0, seed: int = 7) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def draw_of(sampling: SamplingParams, before: Before) -> Draw:
    num_generated = len(before.output)
    history = TokenHistory.of_sequence(sampling, before.all_ids, num_generated)
    return Draw(sampling, len(before.all_ids), num_generated, history)


# --- against the specification ---

filters = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, 400),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0001, 1.0),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "choice": st.integers(0, 3),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.just(((0, 5.0), (3, -100.0), (17, 2.5))),
        "banned_token_ids": st.just((0, 1, 2, 90)),
        "allowed_token_ids": st.sampled_from([(1,), tuple(range(5, 40)), tuple(range(0, 300, 2)), (10**6,)]),
        "stop_token_ids": st.just((4, 9, 12)),
        "min_tokens": st.integers(0, 4),
    },
)
temperatures = st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.7, 50.0])


@given(
    temperature=temperatures,
    options=filters,
    vocab_size=st.sampled_from([2, 30, 95, 96, 97, 300, LARGE]),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
    step=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=500, derandomize=True)
def test_every_option_chooses_what_the_specification_chooses(
    temperature: float, options: dict[str, object], vocab_size: int, spread: float, step: float, seed: int
) -> None:
    logits = random_logits(1, vocab_size, spread, seed)
    if step:
        logits = (logits / step).round() * step
    sampling = params(temperature, **options)
    before = Before([seed % vocab_size, 1, 0], [seed // 3 % vocab_size, 1])
    wanted, margin = choose_densely(logits[0].numpy(), sampling, before, 5)
    assume(margin > 1e-5)  # what hangs on the last bits may go either way
    (got,) = choose(logits, [draw_of(sampling, before)])
    assert got == (NOTHING_LEFT if wanted is None else Choice(wanted, None))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 0.9999, 1.0])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_few_candidates_choose_what_many_choose(top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(20, 20_000, spread)
    logits[0] = 1.0  # all equal: no candidate can be trusted
    logits[1, :300] = logits[1].max()  # more equals at the top than candidates
    wishes = [params(0.8, top_p=top_p, seed=row) for row in range(20)]
    few = sample(logits, wishes, list(range(20)))
    monkeypatch.setattr(race_module, "NUM_CANDIDATES", 20_000)
    assert sample(logits, wishes, list(range(20))) == few


@pytest.mark.parametrize("vocab_size", [1000, LARGE])
def test_the_nucleus_prefers_low_ids_among_equals(vocab_size: int) -> None:
    logits = torch.zeros(200, vocab_size)
    drawn = sample(logits, [params(top_p=10 / vocab_size, seed=seed) for seed in range(200)], [0] * 200)
    assert set(drawn) <= set(range(11))
    assert len(set(drawn)) > 5
    drawn = sample(logits, [params(top_k=300, seed=seed) for seed in range(200)], [0] * 200)
    assert set(drawn) <= set(range(300))
    assert len(set(drawn)) > 100


@pytest.mark.parametrize(
    "options", [{"top_k": 120}, {"top_k": 150, "top_p": 0.97}, {"top_k": 120, "min_p": 0.05}, {"top_p": 0.9}], ids=str
)
def test_the_last_token_of_a_wide_filter_is_the_right_one(options: dict[str, float]) -> None:
    """Nearly flat rows with equals at every edge, in which any token of the filter may win."""
    logits = (random_logits(1500, 300, 4.0) / 0.5).round() * 0.5
    wishes = [params(8.0, seed=row, **options) for row in range(1500)]
    different = [
        row
        for row, token_id in enumerate(sample(logits, wishes, [3] * 1500))
        if (wanted := choose_densely(logits[row].numpy(), wishes[row], Before([1, 1, 1]), 3))[1] > 1e-5
        and wanted[0] != token_id
    ]
    assert different == []


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 500, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_tiny_temperature_is_greedy(options: dict[str, float], scale: float) -> None:
    logits = random_logits(4, LARGE) * scale
    wishes = [params(1e-300, seed=row, **options) for row in range(4)]
    assert sample(logits, wishes, [1] * 4) == logits.argmax(-1).tolist()


# --- by statistics, with fixed seeds ---

SETS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.8},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.5, "temperature": 1.5},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 8, "min_p": 0.1},
    {"min_p": 0.05, "top_p": 0.9, "temperature": 1.3},
    {"top_k": 7, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
]


def assert_follows(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square against the 99.9 % quantile, which is below df + 4.5 sqrt(2 df) for these degrees of freedom."""
    expected = probabilities * counts.sum()
    inside = expected > 0
    assert counts[~inside].sum() == 0
    chi_square = (np.square(counts - expected)[inside] / expected[inside]).sum()
    freedom = max(int(inside.sum()) - 1, 1)
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("options", SETS, ids=str)
@pytest.mark.parametrize("axis", ["position", "seed", "choice"])
def test_tokens_follow_the_distribution(options: dict[str, float], axis: str) -> None:
    num_draws, vocab_size = 5000, 12
    row = random_logits(1, vocab_size, spread=1.0)
    sampling = params(**{"temperature": 1.0, **options})
    probabilities = np.zeros(vocab_size)
    token_ids, probabilities_kept, _ = kept(row[0].double().numpy(), sampling)
    probabilities[token_ids] = probabilities_kept
    draws = [{"position": 9, "seed": 99, "choice": 0} | {axis: index} for index in range(num_draws)]
    wishes = [params(seed=d["seed"], choice=d["choice"], **{"temperature": 1.0, **options}) for d in draws]
    drawn = sample(row.expand(num_draws, -1), wishes, [d["position"] for d in draws])
    assert_follows(np.bincount(drawn, minlength=vocab_size), probabilities)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 2000, "top_p": 0.8}], ids=str)
def test_tokens_follow_the_distribution_beyond_the_candidates(options: dict[str, float]) -> None:
    """The fallback: nearly flat rows, whose filters leave far more tokens than there are candidates."""
    num_draws = 3000
    row = random_logits(1, LARGE, spread=1.0)
    sampling = params(**options)
    token_ids, probabilities, _ = kept(row[0].double().numpy(), sampling)
    assert len(token_ids) > 2 * race_module.NUM_CANDIDATES
    drawn = [
        token_id
        for start in range(0, num_draws, 100)
        for token_id in sample(row.expand(100, -1), [sampling] * 100, list(range(start, start + 100)))
    ]
    place = {token_id: index for index, token_id in enumerate(token_ids)}
    # Twenty groups of tokens, likeliest first, of about the same probability.
    group = np.minimum((np.cumsum(probabilities) * 20).astype(int), 19)
    counts = np.bincount([group[place[token_id]] for token_id in drawn], minlength=20)
    assert_follows(counts, np.bincount(group, probabilities, minlength=20))


def test_bias_and_penalties_shift_the_distribution_as_they_should() -> None:
    num_draws, vocab_size = 5000, 10
    row = random_logits(1, vocab_size, spread=1.0)
    sampling = params(0.9, top_p=0.95, presence_penalty=0.8, repetition_penalty=1.4, logit_bias=((2, 1.5),))
    before = Before([1, 2, 3], [3, 4, 4])
    token_ids, kept_probabilities, _ = kept(edited(row[0].numpy(), sampling, before), sampling)
    probabilities = np.zeros(vocab_size)
    probabilities[token_ids] = kept_probabilities
    history = TokenHistory.of_sequence(sampling, before.all_ids, 3)
    outcomes = choose(row.expand(num_draws, -1), [Draw(sampling, index, 3, history) for index in range(num_draws)])
    drawn = [outcome.token_id for outcome in outcomes if isinstance(outcome, Choice)]
    assert_follows(np.bincount(drawn, minlength=vocab_size), probabilities)


# --- whatever else is in the batch ---

anything = st.builds(
    lambda temperature, options, num_logprobs: params(temperature, num_logprobs=num_logprobs, **options),
    temperatures,
    filters,
    st.sampled_from([None, None, 0, 1, 5, 20]),
)


@given(st.lists(anything, min_size=2, max_size=7), st.sampled_from([30, 300, LARGE]), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=120, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_row_is_the_same_alone_and_with_any_batch_mates(
    wishes: list[SamplingParams], vocab_size: int, rng: random.Random
) -> None:
    num_rows = len(wishes)
    logits = random_logits(num_rows, vocab_size, rng.choice([0.5, 2.0, 5.0]), rng.randrange(1000))
    if rng.random() < 0.3:
        logits[rng.randrange(num_rows), rng.randrange(vocab_size)] = rng.choice([math.nan, math.inf, -math.inf])
    befores = [Before([row, 1, 2], [2, row]) for row in range(num_rows)]
    draws = [draw_of(wish, before) for wish, before in zip(wishes, befores, strict=True)]
    untouched = logits.clone()
    alone = [choose(logits[row : row + 1], [draws[row]])[0] for row in range(num_rows)]
    order = rng.sample(range(num_rows), rng.randint(1, num_rows))
    together = choose(logits[order], [draws[row] for row in order])
    assert together == [alone[row] for row in order]
    assert torch.equal(logits.nan_to_num(), untouched.nan_to_num())


@pytest.fixture
def thread_setter() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("thread_setter")
def test_the_number_of_threads_does_not_show() -> None:
    logits = random_logits(6, 49_152, 2.0)
    wishes = [params(1.0), params(0.8, top_p=0.9), params(top_k=40), params(0.0, num_logprobs=5), params(top_p=0.99)]
    draws = [Draw(wish, row) for row, wish in enumerate([*wishes, params(1.2, min_p=0.01, num_logprobs=3)])]
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results += [choose(logits, draws), [choose(logits[row : row + 1], [draws[row]])[0] for row in range(6)]]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_row_fails_alone(poison: float) -> None:
    logits = random_logits(5, 1000)
    wishes = [params(0.0), params(1.0), params(0.0, num_logprobs=2), params(0.5, top_p=0.9), params(0.0)]
    clean = choose(logits, [Draw(wish, 1) for wish in wishes])
    for row in range(5):
        damaged = logits.clone()
        damaged[row, 17 * row] = poison
        outcomes = choose(damaged, [Draw(wish, 1) for wish in wishes])
        assert outcomes == [NOT_FINITE if each == row else clean[each] for each in range(5)]
    with pytest.raises(ValueError, match="not finite"):
        sample(damaged, wishes, [1] * 5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_options_leave_nothing_fails_alone(temperature: float) -> None:
    logits = random_logits(4, 300)
    nothing = [
        params(temperature, allowed_token_ids=(5, 6), banned_token_ids=(5, 6)),
        params(temperature, allowed_token_ids=(), num_logprobs=1),
        params(temperature, allowed_token_ids=(2,), stop_token_ids=(2,), min_tokens=1),
    ]
    outcomes = choose(logits, [Draw(wish, 1) for wish in (*nothing, params(temperature, allowed_token_ids=(8,)))])
    assert outcomes == [NOTHING_LEFT] * 3 + [Choice(8, None)]


def test_penalties_without_a_history_fail_alone() -> None:
    logits = random_logits(2, 50)
    outcomes = choose(logits, [Draw(params(0.0, presence_penalty=1.0), 1), Draw(params(0.0), 1)])
    assert outcomes == [NO_HISTORY, Choice(int(logits[1].argmax()), None)]


def test_greedy_rows_pay_nothing_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(6, 500)
    wishes = [params(0.0, seed=row) if row % 2 else params(1.0, banned_token_ids=(row,)) for row in range(6)]
    worked: list[int] = []
    real = sampler_module.apply_edits
    monkeypatch.setattr(
        sampler_module, "apply_edits", lambda work, edits: (worked.append(len(work)), real(work, edits))
    )
    assert choose(logits, [Draw(wish, 1) for wish in wishes])[1::2] == [
        Choice(token_id, None) for token_id in logits[1::2].argmax(-1).tolist()
    ]
    assert worked == [3]


def test_no_rows() -> None:
    assert choose(torch.empty(0, 50), []) == []


def test_seed_choice_and_position_all_matter() -> None:
    logits = torch.zeros(1, 5000)
    drawn = {
        sample(logits, [params(seed=seed, choice=choice)], [position])[0]
        for seed in range(4)
        for choice in range(4)
        for position in range(4)
    }
    assert len(drawn) > 55
