from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from cluster.request import SamplingParams  # noqa: E402
from engine import sampler  # noqa: E402
from engine.sampler import gumbel, sample  # noqa: E402

MASK = (1 << 64) - 1


def params(temperature: float, top_p: float = 1.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, seed=seed)


def random_logits(num_rows: int, vocab_size: int, spread: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def plain_gumbel(seed: int, position: int, token_id: int) -> float:
    """The documented hash in Python integers: the oracle of the vectorised one."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    key = mix((mix(seed) + mix(position ^ 0x9E3779B97F4A7C15)) & MASK)
    mixed = mix((key + (token_id - 1) * 0x9E3779B97F4A7C15) & MASK)
    return -math.log(-math.log(((mixed >> 12) + 0.5) / 2**52))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63, 2**64 - 1, 2**70 + 3])
def test_noise_is_the_documented_hash(seed: int) -> None:
    token_ids = torch.tensor([0, 1, 2, 49151, 151935])
    for position in (0, 1, 8191, 131071):
        noise = gumbel(seed, position, token_ids)
        expected = [plain_gumbel(seed & MASK, position, token_id) for token_id in token_ids.tolist()]
        assert noise.tolist() == pytest.approx(expected, rel=1e-12)


def test_noise_leaves_its_argument_alone() -> None:
    token_ids = torch.arange(5)
    gumbel(1, 2, token_ids)
    assert token_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_gumbel_and_uncorrelated_along_every_axis(axis: str) -> None:
    count = 20_000
    if axis == "token":
        noise = gumbel(3, 5, torch.arange(count))
    else:
        one = torch.tensor([11])
        pairs = ((3, index) if axis == "position" else (index, 3) for index in range(count // 4))
        noise = torch.cat([gumbel(seed, position, one) for seed, position in pairs])
    deviation = math.pi / math.sqrt(6)
    assert noise.mean().item() == pytest.approx(0.5772, abs=5 * deviation / math.sqrt(len(noise)))
    assert noise.std().item() == pytest.approx(deviation, rel=0.05)
    centred = noise - noise.mean()
    lag_one = (centred[1:] * centred[:-1]).mean() / centred.square().mean()
    assert abs(lag_one.item()) < 4 / math.sqrt(len(noise))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, [params(0), params(0)], [1, 1]) == [1, 0]


def test_tiny_temperature_is_greedy() -> None:
    logits = random_logits(4, 1000)
    assert sample(logits, [params(1e-300, seed=row) for row in range(4)], [1] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8), (1.5, 0.5), (0.7, 0.95)])
def test_tokens_follow_the_distribution(temperature: float, top_p: float) -> None:
    num_draws, vocab_size = 5000, 12
    logits = random_logits(1, vocab_size, spread=1.0)
    probabilities = (logits[0].double() / temperature).softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    kept = ordered[: int((ordered.cumsum(0) < top_p).sum()) + 1]
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    expected[order[: len(kept)]] = kept / kept.sum() * num_draws

    drawn = sample(
        logits.expand(num_draws, -1), [params(temperature, top_p, seed=99)] * num_draws, list(range(num_draws))
    )
    counts = torch.bincount(torch.tensor(drawn), minlength=vocab_size).double()
    inside = expected > 0
    assert counts[~inside].sum() == 0
    chi_square = ((counts[inside] - expected[inside]).square() / expected[inside]).sum().item()
    # The 99.9 % quantile is below df + 4.5 sqrt(2 df) for these degrees of freedom; the seed is fixed.
    freedom = max(int(inside.sum()) - 1, 1)
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


def test_rows_do_not_notice_their_batch() -> None:
    logits = random_logits(9, 5000)
    wishes = [params(0), params(1.0), params(0.7, 0.9), params(1.3, 0.999), params(0.2, 0.5)] * 2
    wishes = [
        SamplingParams(max_tokens=1, temperature=w.temperature, top_p=w.top_p, seed=i) for i, w in enumerate(wishes)
    ]
    wishes, positions = wishes[:9], [3 * row for row in range(9)]
    alone = [sample(logits[row : row + 1], [wishes[row]], [positions[row]])[0] for row in range(9)]
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    together = sample(logits[order], [wishes[row] for row in order], [positions[row] for row in order])
    assert together == [alone[row] for row in order]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(1, 5000)
    drawn = {sample(logits, [params(1.0, seed=seed)], [position])[0] for seed in range(5) for position in range(5)}
    assert len(drawn) > 20


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_few_candidates_choose_what_the_full_row_chooses(
    top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(20, 20_000, spread)
    logits[0] = 1.0  # all equal: no prefix of candidates can be trusted
    logits[1, :300] = logits[1].max()  # 300 equals at the top, more than the first stage holds
    wishes = [params(0.8, top_p, seed=row) for row in range(20)]
    staged = sample(logits, wishes, list(range(20)))
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", ())
    assert sample(logits, wishes, list(range(20))) == staged


def test_nucleus_prefers_low_ids_among_equals() -> None:
    logits = torch.zeros(1, 1000)
    drawn = {sample(logits, [params(1.0, 0.01, seed=seed)], [0])[0] for seed in range(200)}
    assert drawn <= set(range(11))
