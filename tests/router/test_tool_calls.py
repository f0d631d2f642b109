"""Calls in an answer's text: what is one and what is not, however the text is cut into pieces; nothing is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tool_calls import Call, CallReader
from router.tool_formats import HERMES, LLAMA3_JSON, CallRules, ToolFormat

NAMES = frozenset(("get_weather", "now"))


def rules(written: ToolFormat, *, single: bool = False) -> CallRules:
    return CallRules(written, NAMES, single=single, ends_by_call=True)


def read(asked: CallRules, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(asked)
    text = "".join([reader.feed(piece) for piece in pieces] + [reader.finish()])
    assert [call.index for call in reader.calls] == list(range(len(reader.calls)))
    return text, [(call.name, call.arguments) for call in reader.calls]


PARIS = '{"city": "Paris"}'
WEATHER = HERMES.call("get_weather", PARIS)
NOW = HERMES.call("now", "{}")
WEATHER_CALL, NOW_CALL = ("get_weather", PARIS), ("now", "{}")

HERMES_TABLE: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("", "", []),
    ("Hello", "Hello", []),
    ("\n Hello \n", "\n Hello \n", []),
    (" \n", " \n", []),
    (WEATHER, "", [WEATHER_CALL]),
    (f"\n\n{WEATHER}\n", "", [WEATHER_CALL]),
    (f"{WEATHER}\n{NOW}", "", [WEATHER_CALL, NOW_CALL]),
    (f"{WEATHER}{WEATHER}", "", [WEATHER_CALL, WEATHER_CALL]),
    (f"I look.\n{WEATHER}", "I look.\n", [WEATHER_CALL]),
    (f"{WEATHER}\nDone.", "\nDone.", [WEATHER_CALL]),
    (f"a{WEATHER} b{NOW} c", "a b c", [WEATHER_CALL, NOW_CALL]),
    ('<tool_call>{"name":"now","arguments":{}}</tool_call>', "", [NOW_CALL]),
    ('<tool_call>\t\r\n{ "arguments" : {} , "name" : "now" }\n\n</tool_call>', "", [NOW_CALL]),
    # Numbers, order and escapes of the arguments are left as they are.
    (
        '<tool_call>{"name": "now", "arguments": {"b": 1.0, "a": 1e999, "é": "\\u00e9 \\ud800 }\\" ü"}}</tool_call>',
        "",
        [("now", '{"b": 1.0, "a": 1e999, "é": "\\u00e9 \\ud800 }\\" ü"}')],
    ),
    # Markers in strings are arguments.
    (HERMES.call("now", '{"a": "</tool_call><tool_call>"}'), "", [("now", '{"a": "</tool_call><tool_call>"}')]),
    # No arguments, null, and Llama's name of the key.
    ('<tool_call>{"name": "now"}</tool_call>', "", [NOW_CALL]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW_CALL]),
    ('<tool_call>{"name": "now", "parameters": {"a": 1}}</tool_call>', "", [("now", '{"a": 1}')]),
    # Complete without its end: EOS or a stop string came first, or max_tokens.
    (WEATHER.removesuffix("\n</tool_call>"), "", [WEATHER_CALL]),
    (WEATHER.removesuffix("_call>"), "", [WEATHER_CALL]),
]
# Comes out as it is, and the call after it is found all the same.
NO_CALLS = [
    "<",
    "<tool_call",
    "<tool_call>",
    "<tool_call>\n",
    "</tool_call>",
    "<tool_call> no\n</tool_call>",
    "<tool_call>[]</tool_call>",
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa\n"}}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"a": nul}}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"a": 01}}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {},}</tool_call>',
    '<tool_call>{"name": "get_weather" "arguments": {}}</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{5: "now", "arguments": {}}</tool_call>',
    '<tool_call>{"name": ["now"]}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>{}</tool_call>",
    "<tool_call>{]</tool_call>",
    "<tool_call>{" + "[" * 200 + "]" * 200 + "}</tool_call>",
    '<tool_call>{"name": "now", "arguments": {}} and</tool_call>',
    '<tool_call>{"name": "now", "arguments": {}}</tool_</tool_call>',
    '{"name": "now", "arguments": {}}',
]
LLAMA_WEATHER = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
LLAMA_NOW = '{"name": "now", "parameters": {}}'
LLAMA_TABLE: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("", "", []),
    ("Hello {}", "Hello {}", []),
    (LLAMA_WEATHER, "", [WEATHER_CALL]),
    (f"\n<|python_tag|> {LLAMA_WEATHER}", "", [WEATHER_CALL]),
    (f"{LLAMA_WEATHER}; {LLAMA_NOW}", "", [WEATHER_CALL, NOW_CALL]),
    (f"{LLAMA_WEATHER};<|python_tag|>{LLAMA_NOW};\n", "", [WEATHER_CALL, NOW_CALL]),
    ('{"type": "function", "name": "now", "parameters": {}}', "", [NOW_CALL]),
    ('{"name": "now", "arguments": {"a": "}"}}', "", [("now", '{"a": "}"}')]),
    (f"{LLAMA_NOW}; and so on", "; and so on", [NOW_CALL]),
    (f"{LLAMA_NOW} {{", " {", [NOW_CALL]),
    # Only an answer that begins with a call has calls.
    (f"I look. {LLAMA_WEATHER}", f"I look. {LLAMA_WEATHER}", []),
    (f"; {LLAMA_NOW}", f"; {LLAMA_NOW}", []),
    (f"<|python_tag|>print() {LLAMA_NOW}", f"<|python_tag|>print() {LLAMA_NOW}", []),
    ('{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    ('{"name": "now", "parameters": {', '{"name": "now", "parameters": {', []),
    ('{"answer": <b>}', '{"answer": <b>}', []),
    ("<|python", "<|python", []),
]
BOTH = [(HERMES, *row) for row in HERMES_TABLE] + [(LLAMA3_JSON, *row) for row in LLAMA_TABLE]


@pytest.mark.parametrize(("written", "text", "content", "calls"), BOTH)
def test_every_way_of_cutting_in_two_or_into_characters(
    written: ToolFormat, text: str, content: str, calls: list[Any]
) -> None:
    asked = rules(written)
    assert read(asked, text) == (content, calls)
    assert read(asked, *text) == (content, calls)
    for cut in range(len(text)):
        assert read(asked, text[:cut], text[cut:]) == (content, calls)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_text_as_it_stands(text: str) -> None:
    for pieces in ((text,), tuple(text)):
        assert read(rules(HERMES), *pieces) == (text, [])
        assert read(rules(HERMES), *pieces, f"|{NOW}") == (f"{text}|", [NOW_CALL])
    if not text.startswith("{"):
        assert read(rules(LLAMA3_JSON), text, LLAMA_NOW) == (text + LLAMA_NOW, [])


@pytest.mark.parametrize("written", [HERMES, LLAMA3_JSON])
def test_a_call_that_is_cut_anywhere_is_text_or_complete(written: ToolFormat) -> None:
    whole = written.call("get_weather", '{"city": "Zürich"}')
    complete = len(whole) - len(written.closing)
    for cut in range(1, len(whole)):
        for pieces in ((whole[:cut],), tuple(whole[:cut])):
            text, calls = read(rules(written), *pieces)
            assert (text, len(calls)) == (("", 1) if cut >= complete else (whole[:cut], 0))


@pytest.mark.parametrize(("written", "call"), [(HERMES, NOW), (LLAMA3_JSON, LLAMA_NOW)])
def test_no_more_than_one_call_where_the_client_takes_one(written: ToolFormat, call: str) -> None:
    between = written.between
    assert read(rules(written, single=True), call) == ("", [NOW_CALL])
    assert read(rules(written, single=True), call, "\n ") == ("", [NOW_CALL])
    assert read(rules(written, single=True), call, between, call) == (between + call, [NOW_CALL])


def test_text_is_shown_as_soon_as_it_is_certain_and_a_call_once_it_is_complete() -> None:
    reader = CallReader(rules(HERMES))
    assert [reader.feed(piece) for piece in ("Hi <", "tool", " <tool_call>\n{")] == ["Hi ", "", "<tool "]
    rest = '"name": "now", "arguments": {}}\n</tool_call>'
    for char in rest[:-1]:
        assert reader.feed(char) == ""
        assert reader.calls == []
    reader.feed(rest[-1])
    assert reader.calls == [Call(0, "now", "{}")]


FRAGMENTS = st.sampled_from([*NO_CALLS[:12], "Hi", "é", "<", "tool_call", ">"])
PARTS = st.lists(st.one_of(FRAGMENTS.map(lambda text: (text, False)), st.just((WEATHER, True))), max_size=8)


@given(PARTS)
def test_nothing_is_lost_or_doubled_between_calls(parts: list[tuple[str, bool]]) -> None:
    """Each text is closed by a character that can neither go on with a marker nor with JSON, nor is it a blank."""
    text = "".join(part if is_call else f"|{part}|" for part, is_call in parts)
    content = "".join("" if is_call else f"|{part}|" for part, is_call in parts)
    assert read(rules(HERMES), text) == (content, [WEATHER_CALL] * sum(is_call for _, is_call in parts))


TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "{",
    "}",
    '"',
    '"name": "now"',
    '"arguments": {}',
    ", ",
    "\\",
    "é",
    "x",
]
TOKENS += [";", "<|python_tag|>", "<", WEATHER, NOW, LLAMA_NOW]


@pytest.mark.parametrize("written", [HERMES, LLAMA3_JSON])
@pytest.mark.parametrize("single", [False, True])
@given(parts=st.lists(st.sampled_from(TOKENS), max_size=20), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_pieces_are_as_the_whole(written: ToolFormat, single: bool, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    asked = rules(written, single=single)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = read(asked, text)
    assert read(asked, *pieces) == read(asked, *text) == whole
    assert whole[1] or whole[0] == text
    for name, arguments in whole[1]:
        assert name in NAMES
        json.loads(arguments)


def test_reading_takes_time_in_proportion_to_the_text() -> None:
    """Many beginnings, none of which ends: each character is taken once, not once a beginning."""
    text = '<tool_call>{"a' * 20_000
    reader = CallReader(rules(HERMES))
    taken = 0

    def counting(take: Any) -> Any:
        def count(char: str) -> None:
            nonlocal taken
            taken += 1
            take(char)

        return count

    for name in ("_in_text", "_in_object", "_in_opening", "_before_object"):
        setattr(reader, name, counting(getattr(reader, name)))
    assert reader.feed(text) + reader.finish() == text
    assert taken <= 3 * len(text)
