"""Checks grammars before anything is reserved for them: off the event loop, within limits, each text once."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Final

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from cluster.errors import InvalidRequestError
from cluster.request import MAX_GRAMMAR_LEN, Grammar
from router.structured import Structure

MAX_REMEMBERED: Final = 256
MAX_AT_ONCE: Final = 2
LIMIT_S: Final = 5.0
# A tenth of llguidance's default. Its matching of regular expressions never backtracks.
_MAX_GRAMMAR_SIZE: Final = 50_000
_MAX_MESSAGE_LEN: Final = 200


class GrammarChecker:
    """Turns wishes into grammars that nodes can follow. One a router, in its event loop."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._known: OrderedDict[Structure, Grammar] = OrderedDict()
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def check(self, wish: Structure) -> Grammar:
        """The grammar. Raises :class:`InvalidRequestError` with what is wrong with it."""
        found = self._known.pop(wish, None)
        if found is None:
            try:
                async with asyncio.timeout(self._limit_s), self._turns:
                    found = await asyncio.to_thread(compile_grammar, wish)
            except TimeoutError:
                text = f"Compiling `{wish.field}` takes too long; make it simpler."
                raise InvalidRequestError(text, param=wish.field) from None
        self._known[wish] = found
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found


def compile_grammar(wish: Structure) -> Grammar:
    """The grammar of a wish, checked. Raises :class:`InvalidRequestError`."""
    try:
        match wish.kind:
            case "json_schema":
                grammar, source = Grammar("json_schema", wish.text), LLMatcher.grammar_from_json_schema(wish.text)
            case "regex":
                grammar, source = Grammar("regex", wish.text), LLMatcher.grammar_from_regex(wish.text)
            case "choice" | "grammar" | "lark":
                text = _lark(wish)
                grammar, source = Grammar("lark", text), LLMatcher.grammar_from_lark(text)
        # It says what is wrong in text, with a picture of the place below the first lines.
        failed, messages = LLMatcher.validate_grammar_with_warnings(source, limits=_limits())
        problem = messages[0] if failed else ""
    except Exception as error:  # noqa: BLE001 - the converter raises plain Exception for what it cannot read
        problem = str(error)
    else:
        if len(grammar.text) > MAX_GRAMMAR_LEN:
            problem = f"it is longer than {MAX_GRAMMAR_LEN} characters"
    if problem:
        raise InvalidRequestError(f"`{wish.field}` cannot be used: {_shown(problem)}", param=wish.field)
    return grammar


def _lark(wish: Structure) -> str:
    if wish.kind == "choice":
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(wish.text))
    return wish.text if wish.kind == "lark" else any_to_lark(wish.text)


def _limits() -> LLParserLimits:
    return LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False)


def _shown(problem: str) -> str:
    """The line that says something, short and printable: the others repeat the grammar.

    It may name a part of the grammar, other than errors about prompts: nobody could mend a schema otherwise.
    """
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "unknown reason")
    return "".join(char for char in told if char.isprintable())[:_MAX_MESSAGE_LEN]
