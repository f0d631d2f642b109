"""What an answer must look like: the fields of a request that ask for it, and the one grammar they come to.

OpenAI's ``response_format``; vLLM's ``structured_outputs`` and its older ``guided_*``. Pure: whether a grammar can be
followed is for :mod:`router.grammars` to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from cluster.errors import InvalidRequestError
from cluster.request import MAX_GRAMMAR_LEN

MAX_ALTERNATIVES: Final = 1024
ANY_OBJECT: Final = '{"type":"object"}'

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_LEN)]
Alternatives = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_ALTERNATIVES)]


def _nothing() -> msgspec.Raw:
    """What stands for an absent field (msgspec takes no ``Raw | None``, and no ``Raw`` as a default to document)."""
    return msgspec.Raw(b"")


class JsonSchema(msgspec.Struct, kw_only=True):
    """``response_format.json_schema``."""

    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=_nothing)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """``structured_outputs``: one of these."""

    json: msgspec.Raw = msgspec.field(default_factory=_nothing)
    json_object: bool | None = None
    regex: Text | None = None
    choice: Alternatives | None = None
    grammar: Text | None = None


class StructureFields(msgspec.Struct, kw_only=True):
    """The fields, as both endpoints have them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=_nothing)
    guided_regex: Text | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: Text | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """One wish: ``text`` is a JSON schema, a regular expression, a JSON list of alternatives, or a grammar.

    ``grammar`` may be in any notation that clients use, ``lark`` is in llguidance's own.

    ``field`` is where it came from, for error messages.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "lark"]
    text: str
    field: str


def structure_of(fields: StructureFields) -> Structure | None:
    """What the fields ask for, or None. Raises :class:`InvalidRequestError` for two wishes at once, or half of one."""
    wishes = list(_wishes(fields))
    if not wishes:
        return None
    if len(wishes) > 1:
        names = " and ".join(f"`{wish.field}`" for wish in wishes[:2])
        raise InvalidRequestError(f"{names} cannot be combined.", param=wishes[1].field)
    if len(wishes[0].text) > MAX_GRAMMAR_LEN:
        text = f"`{wishes[0].field}` is longer than {MAX_GRAMMAR_LEN} characters."
        raise InvalidRequestError(text, param=wishes[0].field)
    return wishes[0]


def _wishes(fields: StructureFields) -> Iterator[Structure]:
    if fields.response_format is not None:
        yield from _response_format(fields.response_format)
    if (asked := fields.structured_outputs) is not None:
        if asked.json_object:
            yield Structure("json_schema", ANY_OBJECT, "structured_outputs")
        yield from _of_one("structured_outputs", asked.json, asked.regex, asked.choice, asked.grammar)
    yield from _of_one("guided_json", fields.guided_json, None, None, None)
    yield from _of_one("guided_regex", _nothing(), fields.guided_regex, None, None)
    yield from _of_one("guided_choice", _nothing(), None, fields.guided_choice, None)
    yield from _of_one("guided_grammar", _nothing(), None, None, fields.guided_grammar)


def _response_format(asked: ResponseFormat) -> Iterator[Structure]:
    if asked.type == "json_object":
        yield Structure("json_schema", ANY_OBJECT, "response_format")
    elif asked.type == "json_schema":
        schema = asked.json_schema.schema if asked.json_schema is not None else _nothing()
        if _schema_text(schema, "response_format") is None:
            text = "`response_format` of type json_schema needs `json_schema.schema`."
            raise InvalidRequestError(text, param="response_format")
        yield from _of_one("response_format", schema, None, None, None)


def _of_one(
    field: str, schema: msgspec.Raw, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Structure]:
    if (text := _schema_text(schema, field)) is not None:
        yield Structure("json_schema", text, field)
    if regex is not None:
        yield Structure("regex", regex, field)
    if choice is not None:
        yield Structure("choice", json.dumps(choice, ensure_ascii=False), field)
    if grammar is not None:
        yield Structure("grammar", grammar, field)


def _schema_text(schema: msgspec.Raw, field: str) -> str | None:
    """A schema may be an object, or (as vLLM has it) its JSON as a string; null is none."""
    text = bytes(schema).strip().decode()
    if text in ("", "null"):
        return None
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str).strip()
    if not text.startswith("{"):
        raise InvalidRequestError(f"The schema in `{field}` must be a JSON object.", param=field)
    return text
