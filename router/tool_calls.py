"""Finding calls of functions in an answer's text while it streams.

Text that is no call comes out unchanged, as soon as it is certain that it is none; a call comes out whole, once its
JSON is complete. What only began like a call is text. Every character is looked at once, plus once more when a call
is complete, and no decision looks at where the pieces of the text were cut: pieces and the whole give the same.

Blanks before the first call, and what separates calls, belong to the calls' notation: they are dropped, unless other
text follows them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from router.tool_formats import PYTHON_TAG, CallRules, ToolFormat

_BLANKS: Final = frozenset(" \t\r\n")
# What may stand in JSON outside strings. Anything else, "<" above all, shows that this is none.
_OUTSIDE: Final = frozenset('{}[],:" \t\r\n+-.0123456789eEtrufalsn')
_MAX_DEPTH: Final = 128


@dataclass(frozen=True, slots=True)
class Call:
    """One call; ``arguments`` is a JSON object exactly as the model wrote it."""

    index: int
    name: str
    arguments: str


class CallReader:
    """Reads one answer. :meth:`feed` and :meth:`finish` return the text that is no call, and append to ``calls``.

    A small machine, one character at a time; ``_state`` is the method that takes the next one. Text that may turn
    out to be a call is in ``_held``, of which the object's own text is in ``_object``.
    """

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._hermes = rules.written.name == "hermes"
        self._opening = rules.written.opening.strip() or PYTHON_TAG
        self._closing = rules.written.closing.strip()
        self._out: list[str] = []
        self._held: list[str] = []
        self._object: list[str] = []
        self._matched = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._pending: Call | None = None
        self._state: Callable[[str], None] = self._between
        self.calls: list[Call] = []

    def feed(self, text: str) -> str:
        """Take the next text."""
        if self._state == self._in_text and self._opening[0] not in text:
            return text  # as most texts are
        for char in text:
            self._state(char)
        return self._take()

    def finish(self) -> str:
        """The text is over. A complete object whose closing marker is missing or cut off is a call all the same."""
        if self._pending is not None:
            self._accept()
        elif self._state == self._between and self.calls:
            self._held.clear()  # blanks after the last call
        self._release()
        return self._take()

    def _take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _release(self) -> None:
        """What is held is text."""
        self._out.extend(self._held)
        self._held.clear()
        self._pending = None

    def _between(self, char: str) -> None:
        """At the beginning, or after a call: where the next one may begin."""
        self._held.append(char)
        if char in _BLANKS or (char == ";" and self.calls and not self._hermes):
            return
        if self._rules.single and self.calls:
            self._become_text()
        elif char == self._opening[0]:
            self._matched, self._state = 1, self._in_opening
        elif char == "{" and not self._hermes:
            self._begin_object()
        else:
            self._become_text()

    def _become_text(self) -> None:
        self._release()
        may_call = self._hermes and not (self._rules.single and self.calls)
        self._state = self._in_text if may_call else self._out.append

    def _in_text(self, char: str) -> None:
        """Hermes' calls may follow any text."""
        if char == self._opening[0]:
            self._held.append(char)
            self._matched, self._state = 1, self._in_opening
        else:
            self._out.append(char)

    def _in_opening(self, char: str) -> None:
        if char == self._opening[self._matched]:
            self._held.append(char)
            self._matched += 1
            if self._matched == len(self._opening):
                self._state = self._before_object
        else:
            # The marker's first character stands in it once: another beginning can only be this very character.
            self._become_text()
            self._state(char)

    def _before_object(self, char: str) -> None:
        if char in _BLANKS:
            self._held.append(char)
        elif char == "{":
            self._held.append(char)
            self._begin_object()
        else:
            self._become_text()
            self._state(char)

    def _begin_object(self) -> None:
        self._object = ["{"]
        self._depth, self._in_string, self._escaped = 1, False, False
        self._state = self._in_object

    def _in_object(self, char: str) -> None:
        if char < " " if self._in_string else char not in _OUTSIDE:
            self._become_text()
            self._state(char)
            return
        self._held.append(char)
        self._object.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            else:
                self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                self._become_text()
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_object()

    def _end_object(self) -> None:
        found = read_call("".join(self._object), self._rules.written)
        self._object.clear()
        if found is None or found[0] not in self._rules.names:
            self._become_text()
            return
        self._pending = Call(len(self.calls), *found)
        if self._closing:
            self._matched, self._state = 0, self._in_closing
        else:
            self._accept()

    def _in_closing(self, char: str) -> None:
        if char == self._closing[self._matched]:
            self._held.append(char)
            self._matched += 1
            if self._matched == len(self._closing):
                self._accept()
        elif char in _BLANKS and self._matched == 0:
            self._held.append(char)
        else:
            self._become_text()
            self._state(char)

    def _accept(self) -> None:
        if self._pending is not None:
            self.calls.append(self._pending)
        self._pending = None
        self._held.clear()
        self._state = self._between


def read_call(text: str, written: ToolFormat) -> tuple[str, str] | None:
    """Name and arguments of a call object; None if it is none. Models confuse the two names of the arguments' key."""
    try:
        members = _members(text)
    except (ValueError, IndexError, RecursionError):
        return None
    name, quoted = members.get("name", (None, ""))
    other = "parameters" if written.arguments_key == "arguments" else "arguments"
    value, arguments = members.get(written.arguments_key) or members.get(other) or ({}, "{}")
    if value is None:
        value, arguments = {}, "{}"
    return (name, arguments) if quoted.startswith('"') and isinstance(value, dict) else None


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """An object's values, each with its own text. Raises :class:`ValueError` or :class:`IndexError` if it is none."""
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        if text[at] != '"':
            raise ValueError("no key")
        key, end = _json.raw_decode(text, at)
        at = _skip(text, end)
        if text[at] != ":":
            raise ValueError("no value")
        at = _skip(text, at + 1)
        value, end = _json.raw_decode(text, at)
        members[key] = (value, text[at:end])
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
            if text[at] == "}":
                raise ValueError("nothing after a comma")
        elif text[at] != "}":
            raise ValueError("no comma")
    return members


def _skip(text: str, at: int) -> int:
    while text[at] in _BLANKS:
        at += 1
    return at


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Numbers are only looked at for their form: as text they have no size that Python would refuse.
_json: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=str, parse_float=str)
