"""The functions that a request offers its model, and how free the model is to call them. Pure.

OpenAI's ``tools``, ``tool_choice`` and ``parallel_tool_calls``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from cluster.errors import InvalidRequestError
from cluster.request import MAX_GRAMMAR_LEN
from router.structured import Structure
from router.tool_formats import CallRules, ToolFormat

MAX_TOOLS: Final = 128
# Room for the names and quotes that a grammar puts around the schemas.
MAX_TOOLS_BYTES: Final = MAX_GRAMMAR_LEN * 3 // 4
_NAME_PATTERN: Final = "^[A-Za-z0-9_-]{1,64}$"
_NAME: Final = re.compile(_NAME_PATTERN)
# What json.dumps writes, and chat templates with it: models have seen their calls so. No other blanks are possible
# then, of which a small model can write until it is cut.
_AS_TRAINED: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _NAME_PATTERN})]


class OfferedFunction(msgspec.Struct, kw_only=True):
    """``tools[].function``; ``parameters`` is the JSON schema of its arguments, an object's. Absent: it takes none.

    ``strict`` is taken and changes nothing: forced calls always follow the schema, free ones never have to.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One of ``tools``."""

    type: Literal["function"]
    function: OfferedFunction


class NamedFunction(msgspec.Struct, kw_only=True):
    """``tool_choice.function``."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """``tool_choice`` that names the one function to call."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_TOOLS})]


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call (``auto``), must call, or of which it must call ``named`` once.

    ``parallel`` allows more than one call in an answer.
    """

    functions: tuple[OfferedFunction, ...]
    choice: Literal["auto", "required", "named"]
    parallel: bool
    named: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer is nothing but calls."""
        return self.choice != "auto"

    def rules(self, written: ToolFormat) -> CallRules:
        """How calls are found in the answer. OpenAI ends an answer with a call that it had to make by ``stop``."""
        names = frozenset(function.name for function in self.functions)
        return CallRules(written, names, single=not self.parallel, ends_by_call=self.choice != "named")

    def wish(self, written: ToolFormat) -> Structure:
        """The grammar of an answer that is nothing but calls."""
        callable_ = [one for one in self.functions if self.named in (None, one.name)]
        schemas = {one.name: json.dumps(_arguments_schema(one), ensure_ascii=False) for one in callable_}
        return Structure("lark", written.grammar(schemas, single=not self.parallel), "tools")


def tool_use_of(tools: Sequence[Tool] | None, choice: ToolChoice | None, *, parallel: bool) -> ToolUse | None:
    """What a request asks for; None where nothing may be called. Raises :class:`InvalidRequestError`."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequestError("`tool_choice` needs `tools`.", param="tool_choice")
        return None
    functions = tuple(tool.function for tool in tools)
    check_tools(functions)
    if choice == "none":
        return None
    if not isinstance(choice, NamedTool):
        return ToolUse(functions, choice or "auto", parallel)
    named = choice.function.name
    if all(function.name != named for function in functions):
        raise InvalidRequestError("`tool_choice` names a function that is not among `tools`.", param="tool_choice")
    return ToolUse(functions, "named", parallel=False, named=named)


def check_tools(functions: Sequence[OfferedFunction]) -> None:
    """Raise :class:`InvalidRequestError` for none, too many, bad names, or schemas that are no object's."""
    if not 1 <= len(functions) <= MAX_TOOLS:
        raise InvalidRequestError(f"`tools` must hold between 1 and {MAX_TOOLS} functions.", param="tools")
    names: set[str] = set()
    for position, function in enumerate(functions):
        param = f"tools[{position}].function"
        if not _NAME.fullmatch(function.name):
            text = f"`{param}.name` must be 1 to 64 letters, digits, underscores or dashes."
            raise InvalidRequestError(text, param=f"{param}.name")
        if function.name in names:
            raise InvalidRequestError(f"`{param}.name` is there twice.", param=f"{param}.name")
        names.add(function.name)
        if function.parameters and function.parameters.get("type", "object") != "object":
            text = f"`{param}.parameters` must be the JSON schema of an object."
            raise InvalidRequestError(text, param=f"{param}.parameters")
    if len(msgspec.json.encode([shown(function) for function in functions])) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"`tools` is longer than {MAX_TOOLS_BYTES} bytes.", param="tools")


def shown(function: OfferedFunction) -> dict[str, Any]:
    """A tool as chat templates write it: OpenAI's form, in the order that models were trained on."""
    described = {} if function.description is None else {"description": function.description}
    parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def _arguments_schema(function: OfferedFunction) -> dict[str, Any]:
    schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
    return {"type": "object"} | schema | {"x-guidance": _AS_TRAINED}
