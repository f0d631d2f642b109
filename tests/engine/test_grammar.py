"""Grammars over the demo model's own tokenizer: what may follow, whoever read what came before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tokenizers import Tokenizer

from cluster.model_store import read_config
from cluster.request import Grammar, RequestId, RequestKey, SamplingParams
from engine import grammar as grammar_module
from engine.grammar import GrammarError, Grammars
from engine.penalties import Edit, apply_edits

KEY = RequestKey(RequestId("r"), 0)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def facts(demo_model_dir: Path) -> tuple[Path, int, tuple[int, ...]]:
    found = read_config(demo_model_dir)
    return demo_model_dir / "tokenizer.json", found.vocab_size, found.eos_token_ids


@pytest.fixture
def grammars(facts: tuple[Path, int, tuple[int, ...]]) -> Grammars:
    return Grammars(*facts)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def walk(grammars: Grammars, grammar: Grammar, token_ids: list[int], key: RequestKey = KEY) -> list[np.ndarray]:
    """The masks before each token and after the last."""
    masks = []
    for end in range(len(token_ids) + 1):
        masks.append(grammars.allowed(key, 0, grammar, token_ids[:end]))
        if end < len(token_ids):
            assert masks[-1][token_ids[end]], f"token {end} of what the grammar describes is not allowed"
    return masks


def test_a_text_of_the_grammar_is_allowed_to_its_end_and_then_only_to_end(
    grammars: Grammars, tokenizer: Tokenizer, facts: tuple[Path, int, tuple[int, ...]]
) -> None:
    masks = walk(grammars, SCHEMA, ids(tokenizer, '{"name": "Bob", "age": 42}'))
    eos = set(facts[2])
    assert not any(masks[0][token_id] for token_id in eos)
    assert set(np.flatnonzero(masks[-1]).tolist()) == eos
    assert masks[0].shape == (facts[1],)
    assert not masks[0][ids(tokenizer, "Hello")[0]]


def test_whoever_reads_the_output_finds_the_same(grammars: Grammars, tokenizer: Tokenizer) -> None:
    token_ids = ids(tokenizer, '{"name": "A", "age": 7}')
    masks = walk(grammars, SCHEMA, token_ids)
    for end, mask in enumerate(masks):  # as another node does after a handoff, or this one after preemption
        again = grammars.allowed(RequestKey(RequestId("other"), end), 0, SCHEMA, token_ids[:end])
        assert (again == mask).all()
    assert (grammars.allowed(KEY, 0, SCHEMA, token_ids[:2]) == masks[2]).all()


def test_choices_have_states_of_their_own(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "yes|no")
    yes, no = ids(tokenizer, "yes"), ids(tokenizer, "no")
    grammars.allowed(KEY, 0, grammar, [])
    grammars.allowed(KEY, 1, grammar, [])
    ended = grammars.allowed(KEY, 0, grammar, yes)
    assert (grammars.allowed(KEY, 1, grammar, no) == ended).all()


def test_forgotten_states_are_read_again(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_STATES", 1)
    token_ids = ids(tokenizer, '{"name": "A", "age": 7}')
    other = RequestKey(RequestId("other"), 0)
    for end in range(len(token_ids)):
        assert (
            grammars.allowed(KEY, 0, SCHEMA, token_ids[:end]) == grammars.allowed(other, 0, SCHEMA, token_ids[:end])
        ).all()
    assert len(grammars._states) == 1


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "[1]"),
        Grammar("json_schema", '{"type":"nope"}'),
        Grammar("regex", "("),
        Grammar("lark", "%"),
    ],
)
def test_what_no_router_of_ours_sends_fails_alone(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError):
            grammars.allowed(KEY, 0, grammar, [])
    assert grammars.allowed(KEY, 0, Grammar("regex", "yes"), []).any()


def test_output_that_does_not_fit_is_an_error_not_a_guess(grammars: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError):
        grammars.allowed(KEY, 0, SCHEMA, ids(tokenizer, "Hello"))
    assert grammars.allowed(KEY, 0, SCHEMA, ids(tokenizer, "{")).any()


def test_a_missing_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        Grammars(tmp_path / "none.json", 100, ()).allowed(KEY, 0, SCHEMA, [])


@pytest.mark.parametrize("bad", ["{", "[]", '{"model": 1}'])
def test_a_broken_tokenizer_is_said(tmp_path: Path, bad: str) -> None:
    (tmp_path / "tokenizer.json").write_text(bad)
    with pytest.raises(GrammarError, match="tokenizer"):
        Grammars(tmp_path / "tokenizer.json", 100, ()).allowed(KEY, 0, SCHEMA, [])


def test_min_tokens_holds_until_the_answer_can_only_end() -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=(2,), grammar=Grammar("regex", "x"))
    for allowed, left in (((2, 4), [4]), ((2,), [2]), ((4, 5), [4, 5])):
        logits = np.zeros((1, 8), np.float32)
        mask = np.zeros(8, np.bool_)
        mask[list(allowed)] = True
        apply_edits(logits, [Edit(0, sampling, 1, None, mask)])
        assert np.flatnonzero(logits[0] == 0).tolist() == left
