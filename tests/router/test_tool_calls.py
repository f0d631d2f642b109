"""Calls in an answer's text: what is one and what is not, however the text is cut into pieces; nothing is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import tool_calls
from router.tool_calls import Call, CallPart, CallReader, whole_calls
from router.tool_formats import HERMES, LLAMA3_JSON, CallRules, ToolFormat

NAMES = frozenset(("get_weather", "now"))


def rules(written: ToolFormat, *, single: bool = False) -> CallRules:
    return CallRules(written, NAMES, single=single, ends_by_call=True)


def read(asked: CallRules, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(asked)
    text, parts = "", []
    for piece in pieces:
        text += reader.feed(piece)
        parts += reader.take()
    text += reader.finish()
    calls = whole_calls([*parts, *reader.take()])
    assert len(calls) == reader.num_calls
    return text, [(call.name, call.arguments) for call in calls]


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
    # Arguments that are no JSON are what the model wrote: nothing else could be shown, once a part of them is out.
    ('<tool_call>{"name": "now", "arguments": {"a": Paris}}</tool_call>', "", [("now", '{"a": Paris}')]),
    ('<tool_call>{"name": "now", "arguments": {"a": "b\nc"}}</tool_call>', "", [("now", '{"a": "b\nc"}')]),
    ('<tool_call>{"name": "now", "arguments": {"a": NaN, "b": 01}}</tool_call>', "", [("now", '{"a": NaN, "b": 01}')]),
    ('<tool_call>{"name": "now", "arguments": {\'a\': "<b>"}}</tool_call>!', "!", [("now", "{'a': \"<b>\"}")]),
    # Braces that the model forgot, and what is none of the call's own.
    ('<tool_call>{"name": "now", "arguments": {"a": [1}</tool_call>!', "!", [("now", '{"a": [1}')]),
    ('<tool_call>{"name": "now", "arguments": {}</tool_call>!', "!", [NOW_CALL]),
    ('<tool_call>{"name": "now", "arguments": {},}</tool_call>', "", [NOW_CALL]),
    ('<tool_call>{"name": "now", "arguments": {}, "id": "</tool_call>"}</tool_call>', "", [NOW_CALL]),
    ('<tool_call>{"name": "now", "arguments": {}} and</tool_call>', " and</tool_call>", [NOW_CALL]),
    ('<tool_call>{"name": "now", "arguments": {}}</tool_</tool_call>', "</tool_</tool_call>", [NOW_CALL]),
    # Named after its arguments.
    ('<tool_call>{"arguments": {"a": {}}, "name": "now"}</tool_call>', "", [("now", '{"a": {}}')]),
    ('<tool_call>{"id": {"a": 1}, "name": "now", "arguments": {"b": {}}}</tool_call>', "", [("now", '{"b": {}}')]),
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
    '<tool_call>{"name": "get_weather", "id": 01, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": NaN}, "name": "now"}</tool_call>',
    '<tool_call>{"arguments": {"a": "b\n"}, "name": "now"}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "now"</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": "{}"}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "get_weather",}</tool_call>',
    '<tool_call>{"name": "get_weather" "arguments": {}}</tool_call>',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{5: "now", "arguments": {}}</tool_call>',
    '<tool_call>{"name": ["now"]}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>{}</tool_call>",
    "<tool_call>{]</tool_call>",
    "<tool_call>{" + "[" * 200 + "]" * 200 + "}</tool_call>",
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
    ('{"name": "now", "parameters": {', "", [("now", "{")]),
    ('{"name": "now", "parameters": ', '{"name": "now", "parameters": ', []),
    ('{"name": "now", "parameters": {"a": <b>}}', "", [("now", '{"a": <b>}')]),
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
def test_a_call_that_is_cut_anywhere_is_text_or_has_begun(written: ToolFormat) -> None:
    arguments = '{"city": "Zürich }"}'
    whole = written.call("get_weather", arguments)
    begin = whole.index(arguments)
    for cut in range(1, len(whole)):
        for pieces in ((whole[:cut],), tuple(whole[:cut])):
            reader = CallReader(rules(written))
            text = "".join(map(reader.feed, pieces)) + reader.finish()
            if cut <= begin:
                assert (text, reader.take(), reader.cut) == (whole[:cut], (), False)
            else:
                assert text == ""
                assert whole_calls(reader.take()) == [Call(0, "get_weather", whole[begin:cut][: len(arguments)])]
                assert reader.cut == (cut < begin + len(arguments))


@pytest.mark.parametrize(("written", "call"), [(HERMES, NOW), (LLAMA3_JSON, LLAMA_NOW)])
def test_no_more_than_one_call_where_the_client_takes_one(written: ToolFormat, call: str) -> None:
    between = written.between
    assert read(rules(written, single=True), call) == ("", [NOW_CALL])
    assert read(rules(written, single=True), call, "\n ") == ("", [NOW_CALL])
    assert read(rules(written, single=True), call, between, call) == (between + call, [NOW_CALL])


def test_text_and_arguments_are_shown_as_soon_as_they_are_certain() -> None:
    reader = CallReader(rules(HERMES))
    assert [reader.feed(piece) for piece in ("Hi <", "tool", " <tool_call>\n{")] == ["Hi ", "", "<tool "]
    for char in '"name": "now", "arguments": ':
        assert (reader.feed(char), reader.take()) == ("", ())
    assert (reader.feed("{"), reader.take()) == ("", (CallPart(0, "now", "{"),))
    for char in '"a": "}{", "b": [{}]}':
        assert (reader.feed(char), reader.take()) == ("", (CallPart(0, None, char),))
    assert (reader.feed("}\n</tool_"), reader.take()) == ("", ())
    begun = NOW.index("{}") + 1
    assert (reader.feed(f"call> ok {NOW[:begun]}"), reader.take()) == (" ok ", (CallPart(1, "now", "{"),))
    assert (reader.feed(NOW[begun:] + NOW), reader.take()) == ("", (CallPart(1, None, "}"), CallPart(2, "now", "{}")))


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
        assert arguments == "{}" or (arguments[0] == "{" and arguments in text)
    reader, parts = CallReader(asked), []
    for char in text:
        reader.feed(char)
        parts += reader.take()
    assert all(part.name is not None or part.arguments for part in parts)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("written", [HERMES, LLAMA3_JSON])
@given(
    st.dictionaries(st.text(max_size=9), VALUES, max_size=4),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.dictionaries(st.sampled_from(["id", "type", "meta"]), VALUES, max_size=2),
)
def test_arguments_are_those_of_a_json_parser(
    written: ToolFormat, arguments: dict[str, Any], indent: int | None, ascii_only: bool, more: dict[str, Any]
) -> None:
    """Wherever they stand in the object, in any notation, character for character."""
    shown = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    others = [json.dumps({key: value})[1:-1] for key, value in more.items()]
    named, given_ = '"name": "now"', f'"{written.arguments_key}": {shown}'
    for members in ([named, given_, *others], [*others, named, given_], [given_, *others, named]):
        text = f"{written.opening}{{{', '.join(members)}}}{written.closing}"
        assert read(rules(written), *text) == read(rules(written), text) == ("", [("now", shown)])


def test_an_object_is_read_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its members look like the arguments, or open braces where none may be."""
    num_read = 0
    real = tool_calls.read_call

    def counting(text: str, written: ToolFormat) -> Any:
        nonlocal num_read
        num_read += len(text)
        return real(text, written)

    monkeypatch.setattr(tool_calls, "read_call", counting)
    for member in ('"arguments": {}, ', '"arguments": {}', '"arguments": {"name": "now", '):
        num_read, text = 0, "{" + member * 5_000 + "}"
        read(rules(LLAMA3_JSON), text)
        assert num_read <= 2 * len(text) + 10


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
