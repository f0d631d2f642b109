"""Wishes for a form of answer: one wish or a clear refusal, and grammars that are checked within limits."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import pytest

from cluster.errors import InvalidRequestError
from cluster.request import MAX_GRAMMAR_LEN, Grammar
from router import grammars
from router.grammars import GrammarChecker, compile_grammar
from router.structured import ANY_OBJECT, Structure, StructureFields, structure_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MANY: dict[str, Any] = {"type": "object", "properties": {str(i): {"type": "string"} for i in range(3000)}}


def wish(**fields: Any) -> Structure | None:
    return structure_of(msgspec.json.decode(json.dumps(fields), type=StructureFields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "json": None}},
        {"guided_json": None, "guided_regex": None},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert wish(**fields) is None


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["é", "b"]}}, "choice", '["é", "b"]'),
        ({"structured_outputs": {"grammar": "x"}}, "grammar", "x"),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": "g"}, "grammar", "g"),
    ],
)
def test_one_wish(fields: dict[str, Any], kind: str, text: str) -> None:
    found = wish(**fields)
    assert found is not None
    assert (found.kind, found.text, found.field) == (kind, text, next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "text"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"guided_json": 5},
        {"guided_json": {"description": "x" * MAX_GRAMMAR_LEN}},
    ],
)
def test_half_a_wish_and_two_wishes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        wish(**fields)
    assert refusal.value.param in fields


@pytest.mark.parametrize(
    "fields",
    [{"guided_choice": []}, {"guided_regex": ""}, {"guided_choice": [1]}, {"response_format": {"type": "xml"}}],
)
def test_mistyped_wishes_do_not_decode(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        wish(**fields)


NESTED: dict[str, Any] = {"type": "object"}
for _ in range(60):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps(NESTED)),
        ("json_schema", "{}"),
        ("json_schema", '{"type": "string", "pattern": "^(a+)+$"}'),
        ("regex", "(a+)+$"),
        ("regex", "x{1,100000}"),
        ("choice", '["yes", "no \\"quoted\\"", "né\\n"]'),
        ("grammar", 'root ::= "a" | "b" root'),
        ("grammar", 'start: "a" | "b" start'),
    ],
)
def test_p7_what_looks_dangerous_but_is_not_compiles(kind: Any, text: str) -> None:
    assert isinstance(compile_grammar(Structure(kind, text, "f")), Grammar)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "nope"}'),
        ("json_schema", '{"type": "integer", "minimum": ' + "9" * 400 + "}"),
        ("json_schema", '{"$ref": "http://169.254.169.254/x"}'),
        ("json_schema", '{"$ref": "#/nothing"}'),
        (
            "json_schema",
            json.dumps(MANY),
        ),
        ("json_schema", "{"),
        ("regex", "((("),
        ("regex", "a(?=b)"),
        ("regex", "[" * 20_000),
        ("grammar", "%%%"),
        ("grammar", "start: nothing"),
    ],
)
def test_p7_what_cannot_be_followed_is_refused_in_one_short_line(kind: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        compile_grammar(Structure(kind, text, "response_format"))
    assert refusal.value.param == "response_format"
    assert len(refusal.value.message) < 300
    assert "\n" not in refusal.value.message


async def test_a_grammar_is_compiled_once_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counting(one: Structure) -> Grammar:
        compiled.append(one.text)
        return compile_grammar(one)

    monkeypatch.setattr(grammars, "compile_grammar", counting)
    monkeypatch.setattr(grammars, "MAX_REMEMBERED", 2)
    checker = GrammarChecker()
    for text in ("a", "a", "b", "a", "c", "b"):
        await checker.check(Structure("regex", text, "f"))
    assert compiled == ["a", "b", "c", "b"]
    assert len(checker._known) == 2


async def test_a_grammar_that_takes_too_long_is_refused_and_the_loop_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(one: Structure) -> Grammar:
        go_on.wait(30)
        return compile_grammar(one)

    monkeypatch.setattr(grammars, "compile_grammar", slow)
    checker = GrammarChecker(limit_s=0.05)
    try:
        with pytest.raises(InvalidRequestError, match="too long"):
            await checker.check(Structure("regex", "a", "f"))
    finally:
        go_on.set()
    monkeypatch.setattr(grammars, "compile_grammar", compile_grammar)
    async with asyncio.timeout(30):
        assert await GrammarChecker().check(Structure("regex", "a", "f")) == Grammar("regex", "a")
