"""What a request's grammar lets follow: masks over the vocabulary, by llguidance.

A grammar's state is a function of the tokens generated so far, so nothing of it crosses the handoff: the decode node
takes up where the prefill node stopped by reading token 0. States kept here only save reading them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from cluster.request import Grammar, RequestKey

# Enough for every request a node holds; more only cost the reading of their tokens again.
MAX_STATES: Final = 1024
MAX_COMPILED: Final = 64

CANNOT_GO_ON: Final = "the grammar is too complex, or does not fit what was generated"

Allowed = npt.NDArray[np.bool_]


class GrammarError(Exception):
    """A grammar cannot say what may follow. The message is safe to show to a client."""


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    num_read: int


class Grammars:
    """The states of all sequences with a grammar. Not thread-safe: belongs to the thread that runs steps."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size``: of the logits. Nothing is read before :meth:`load`, or the first use."""
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._states: OrderedDict[tuple[RequestKey, int], _State] = OrderedDict()
        self._compiled = lru_cache(maxsize=MAX_COMPILED)(self._compile)
        self._tokenizer: LLTokenizer | None = None

    def load(self) -> LLTokenizer:
        """Read the tokenizer: half a second that a serving node must not spend, since it keeps the GIL all the time.

        Raises :class:`GrammarError` if it cannot be used.
        """
        if self._tokenizer is None:
            try:
                text = self._file.read_text(encoding="utf-8")
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)
            except (OSError, ValueError, RuntimeError) as error:
                raise GrammarError("this model's tokenizer cannot be used with grammars") from error
        return self._tokenizer

    def allowed(self, key: RequestKey, choice: int, grammar: Grammar, output_token_ids: Sequence[int]) -> Allowed:
        """Which tokens may follow ``output_token_ids``: bool ``[vocab_size]``.

        Raises :class:`GrammarError` if the output does not fit the grammar, or following it takes too much.
        """
        state = self._states.pop((key, choice), None)
        if state is None or state.num_read > len(output_token_ids):
            state = _State(self._compiled(grammar).deep_copy(), 0)
        new = output_token_ids[state.num_read :]
        if new and not state.matcher.consume_tokens(list(new)):
            raise GrammarError(CANNOT_GO_ON)
        state.num_read = len(output_token_ids)
        mask = state.matcher.compute_bitmask()
        if state.matcher.is_error():
            raise GrammarError(CANNOT_GO_ON)
        self._states[key, choice] = state
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little")
        return bits.astype(np.bool_)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self.load(), source_of(grammar), log_level=0)
        if matcher.is_error():
            raise GrammarError("the grammar cannot be compiled")
        return matcher


def source_of(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises :class:`GrammarError` for a schema that is no JSON object."""
    try:
        match grammar.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(grammar.text)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "lark":
                return LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise GrammarError("the schema is not a JSON object") from error
