"""What each option does to the logits, against the dense specification."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch")

from dense_sampler import Before, edited  # noqa: E402

from cluster.request import SamplingParams  # noqa: E402
from engine.history import TokenHistory  # noqa: E402
from engine.penalties import Edit, apply_edits  # noqa: E402

VOCABULARY = 12
ids = st.integers(0, VOCABULARY - 1)
# Some outside the vocabulary: no tokens, no effect.
any_ids = st.lists(st.integers(0, VOCABULARY + 3), max_size=5).map(tuple)
options = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    stop_token_ids=any_ids,
    min_tokens=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 1e-9, 1e9]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY + 3), st.floats(-100, 100, width=32), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_token_ids=st.none() | any_ids,
    banned_token_ids=any_ids,
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), max_size=6).map(tuple),
)
befores = st.builds(Before, st.lists(ids, min_size=1, max_size=8), st.lists(ids, max_size=8))


def edit_of(row: int, sampling: SamplingParams, before: Before) -> Edit:
    num_generated = len(before.output)
    history = TokenHistory.of_sequence(sampling, before.all_ids, num_generated)
    return Edit(row, sampling, num_generated, history, output_token_ids=before.output)


@given(st.lists(st.tuples(options, befores), min_size=1, max_size=5), st.integers(0, 2**32))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_every_row_is_edited_as_specified(rows: list[tuple[SamplingParams, Before]], seed: int) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    expected = [edited(logits[row].numpy(), *each) for row, each in enumerate(rows)]
    apply_edits(logits.numpy(), [edit_of(row, *each) for row, each in enumerate(rows)])
    for row, wanted in enumerate(expected):
        assert logits[row].tolist() == wanted.tolist()


def test_rows_without_an_edit_are_left_alone() -> None:
    logits = torch.randn(3, VOCABULARY)
    before = logits.clone()
    sampling = SamplingParams(max_tokens=5, logit_bias=((3, 50.0),), banned_token_ids=(4,))
    apply_edits(logits.numpy(), [Edit(1, sampling, 0, None)])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert (logits[1] != before[1]).nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize(("num_generated", "banned"), [(0, True), (4, True), (5, False), (9, False)])
def test_min_tokens_bans_stop_tokens_until_so_many_are_generated(num_generated: int, banned: bool) -> None:
    logits = torch.zeros(1, VOCABULARY)
    sampling = SamplingParams(max_tokens=50, min_tokens=5, stop_token_ids=(2, 7, 999, -1, 2**40))
    assert sampling.edits_logits(num_generated) == banned
    apply_edits(logits.numpy(), [Edit(0, sampling, num_generated, None)])
    assert logits[0].isinf().nonzero().flatten().tolist() == ([2, 7] if banned else [])


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], []), ([1], [2]), ([5, 1], [2]), ([1, 2], [3]), ([2], []), ([1, 2, 3], []), ([9, 1, 2], [3]), ([7, 7], [7])],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(output: list[int], banned: list[int]) -> None:
    """In the output, not in the prompt; ids outside the vocabulary are no tokens."""
    sampling = SamplingParams(max_tokens=50, bad_words=((1, 2), (1, 2, 3), (7, 7, 7), (7, 999)))
    logits = torch.zeros(1, VOCABULARY)
    assert sampling.edits_logits(len(output))
    assert sampling.reads_output
    apply_edits(logits.numpy(), [Edit(0, sampling, len(output), None, output_token_ids=output)])
    assert logits[0].isinf().nonzero().flatten().tolist() == banned


def test_history_counts_as_a_counter_does() -> None:
    rng = random.Random(3)
    sampling = SamplingParams(max_tokens=5, repetition_penalty=1.1, frequency_penalty=0.1)
    prompt = [rng.randrange(50) for _ in range(100)]
    output: list[int] = []
    history = TokenHistory.of_sequence(sampling, prompt, 0)
    assert history is not None
    for _ in range(100):
        token_id = rng.randrange(80)
        output.append(token_id)
        history.append(token_id)
        found = dict(zip(*(array.tolist() for array in history.arrays()), strict=True))
        assert found == {each: output.count(each) for each in {*prompt, *output}}
        copy = TokenHistory.of_counts(history.counts())
        assert copy is not None
        assert found == dict(zip(*(array.tolist() for array in copy.arrays()), strict=True))


def test_history_keeps_only_what_the_options_need() -> None:
    plain = SamplingParams(max_tokens=5, logit_bias=((1, 1.0),), min_tokens=3)
    assert TokenHistory.of_sequence(plain, [1, 2], 1) is None
    output_only = TokenHistory.of_sequence(SamplingParams(max_tokens=5, presence_penalty=1.0), [1, 2, 3, 3], 2)
    assert output_only is not None
    assert [array.tolist() for array in output_only.arrays()] == [[3], [2]]
    assert [array.dtype for array in TokenHistory((), {}).arrays()] == [np.int64, np.int64]
