"""Finding calls of functions in an answer's text while it streams.

Text that is no call comes out unchanged, as soon as it is certain that it is none. A call is one as soon as its object
has named an offered function and opens the arguments: its name comes out then, and the arguments as they are written,
up to the brace that closes them or the end of the answer. Nothing that came out is ever taken back. (An object that
names the function after the arguments is a call once it is complete.) What only began like a call is text.

No decision looks at where the pieces of the text were cut, so that pieces and the whole give the same; every character
is looked at a bounded number of times.

Blanks before the first call, and what separates calls, belong to the calls' notation: they are dropped, unless other
text follows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from router.tool_formats import PYTHON_TAG, CallRules, ToolFormat

_BLANKS: Final = frozenset(" \t\r\n")
# What may stand in JSON outside strings. Anything else, "<" above all, shows that this is none.
_OUTSIDE: Final = frozenset('{}[],:" \t\r\n+-.0123456789eEtrufalsn')
_MAX_DEPTH: Final = 128
# Models confuse the two names of the arguments' key.
_ARGUMENTS_KEY: Final = re.compile(r'[ \t\r\n]*"(?:arguments|parameters)"[ \t\r\n]*:[ \t\r\n]*\{')


@dataclass(frozen=True, slots=True)
class Call:
    """One call; ``arguments`` is a JSON object exactly as the model wrote it, or its beginning if it was cut there."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """What a text adds to call ``index``: its ``name``, with the first part only, and more of its arguments."""

    index: int
    name: str | None
    arguments: str


def whole_calls(parts: Iterable[CallPart]) -> list[Call]:
    """The calls that consecutive parts make."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.name is not None:
            names.append(part.name)
            arguments.append([])
        arguments[part.index].append(part.arguments)
    return [Call(index, name, "".join(texts)) for index, (name, texts) in enumerate(zip(names, arguments, strict=True))]


class CallReader:
    """Reads one answer. :meth:`feed` and :meth:`finish` return the text that is no call; :meth:`take` what they found
    of calls. ``cut`` says at the end that the last call's arguments never closed.

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
        self._member = 0  # where in the object its current member begins; -1 once that has opened a bracket
        self._is_tried = False
        self._matched = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._parts: list[CallPart] = []
        self._written: list[str] = []  # of the current call's arguments, what is in no part yet
        self._state: Callable[[str], None] = self._between
        self.num_calls = 0
        self.cut = False

    def feed(self, text: str) -> str:
        """Take the next text."""
        if self._state == self._in_text and self._opening[0] not in text:
            return text  # as most texts are
        for char in text:
            self._state(char)
        return self._shown()

    def finish(self) -> str:
        """The text is over. A call that has begun is one, whatever is missing."""
        self.cut = self._state == self._in_arguments
        if self.num_calls and self._state in (self._between, self._after_arguments, self._in_closing):
            self._held.clear()  # what ends or separates calls
        self._release()
        return self._shown()

    def take(self) -> tuple[CallPart, ...]:
        """What was found of calls since the last time."""
        self._flush()
        parts, self._parts = tuple(self._parts), []
        return parts

    def _shown(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _release(self) -> None:
        """What is held is text."""
        self._out.extend(self._held)
        self._held.clear()

    def _between(self, char: str) -> None:
        """At the beginning, or after a call: where the next one may begin."""
        self._held.append(char)
        if char in _BLANKS or (char == ";" and self.num_calls and not self._hermes):
            return
        if self._rules.single and self.num_calls:
            self._become_text()
        elif char == self._opening[0]:
            self._matched, self._state = 1, self._in_opening
        elif char == "{" and not self._hermes:
            self._begin_object()
        else:
            self._become_text()

    def _become_text(self) -> None:
        self._release()
        may_call = self._hermes and not (self._rules.single and self.num_calls)
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
        self._object, self._member, self._is_tried = ["{"], 1, False
        self._depth, self._in_string, self._escaped = 1, False, False
        self._state = self._in_object

    def _in_object(self, char: str) -> None:
        if not self._may_follow(char):
            self._become_text()
            self._state(char)
            return
        self._held.append(char)
        self._object.append(char)
        at_top = self._depth == 1 and not self._in_string
        self._scan(char)
        if self._depth == 0:
            self._end_object()
        elif self._depth > _MAX_DEPTH:
            self._become_text()
        elif at_top and char == ",":
            self._member = len(self._object)
        elif at_top and self._depth == 2 and self._member >= 0:
            member, self._member = "".join(self._object[self._member :]), -1
            if char == "{" and not self._is_tried and _ARGUMENTS_KEY.fullmatch(member):
                self._is_tried = True
                self._begin_arguments()

    def _may_follow(self, char: str) -> bool:
        return char >= " " if self._in_string else char in _OUTSIDE

    def _scan(self, char: str) -> None:
        """Follow strings and brackets."""
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
        elif char in "}]":
            self._depth -= 1

    def _begin_arguments(self) -> None:
        """The arguments open. If all before them is right, and names a function, this is a call from here on."""
        found = read_call("".join((*self._object, "}}")), self._rules.written)
        if found is not None and found[0] in self._rules.names:
            self._begin_call(found[0])
            self._written.append("{")
            self._state = self._in_arguments

    def _in_arguments(self, char: str) -> None:
        """The model's own text, be it JSON or not: who asked for it sees what is wrong with it."""
        if char == "<" and not self._in_string and self._closing:
            self._end_call()  # no JSON: the model closes the call without having closed its braces
            self._state(char)
            return
        self._written.append(char)
        self._scan(char)
        if self._depth == 1:
            self._state = self._after_arguments

    def _after_arguments(self, char: str) -> None:
        """The rest of the object."""
        if not self._may_follow(char):
            if char == "<" and self._closing:
                self._end_call()
            else:
                self._become_text()
            self._state(char)
            return
        self._held.append(char)
        self._scan(char)
        if self._depth == 0:
            self._end_call()

    def _end_object(self) -> None:
        """An object that named no function before its arguments is complete."""
        found = read_call("".join(self._object), self._rules.written)
        if found is None or found[0] not in self._rules.names:
            self._become_text()
            return
        self._begin_call(found[0])
        self._written.append(found[1])
        self._end_call()

    def _begin_call(self, name: str) -> None:
        self._held.clear()
        self._object.clear()
        self._parts.append(CallPart(self.num_calls, name, ""))
        self.num_calls += 1

    def _flush(self) -> None:
        """Written arguments become a part: of the last one, if that is the current call's and still here."""
        if not self._written:
            return
        part = CallPart(self.num_calls - 1, None, "".join(self._written))
        self._written.clear()
        if self._parts and self._parts[-1].index == part.index:
            last = self._parts.pop()
            part = CallPart(part.index, last.name, last.arguments + part.arguments)
        self._parts.append(part)

    def _end_call(self) -> None:
        self._flush()
        self._held.clear()
        self._matched, self._state = 0, self._in_closing if self._closing else self._between

    def _in_closing(self, char: str) -> None:
        if char == self._closing[self._matched]:
            self._held.append(char)
            self._matched += 1
            if self._matched == len(self._closing):
                self._held.clear()
                self._state = self._between
        elif char in _BLANKS and self._matched == 0:
            self._held.append(char)
        else:
            self._become_text()
            self._state(char)


def read_call(text: str, written: ToolFormat) -> tuple[str, str] | None:
    """Name and arguments of a call object; None if it is none."""
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
