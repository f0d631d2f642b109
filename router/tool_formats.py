"""How models write calls of functions: two formats, as text, as a grammar and as words that teach them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from cluster.errors import InvalidRequestError

FormatName = Literal["hermes", "llama3_json"]
ParserName = Literal["auto", "hermes", "llama3_json"]
PARSER_NAMES: Final[tuple[ParserName, ...]] = ("auto", "hermes", "llama3_json")

PYTHON_TAG: Final = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call: ``opening``, an object with ``name`` and ``arguments_key``, ``closing``; ``between`` two calls."""

    name: FormatName
    opening: str
    closing: str
    between: str
    arguments_key: str

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be seen even where a vocabulary has it as special tokens, whose text is not shown."""
        return tuple(marker for text in (self.opening, self.closing) if (marker := text.strip()))

    def call(self, name: str, arguments: str) -> str:
        """One call; ``arguments`` is JSON."""
        return f"{self.opening}{self._head(name)}{arguments}}}{self.closing}"

    def grammar(self, schemas: Mapping[str, str], *, single: bool) -> str:
        """One or (unless ``single``) more calls of these functions, in llguidance's Lark.

        ``schemas``: by function name, whose characters need no quoting, the JSON schema of the arguments.
        """
        rules = [f"start: call{'' if single else f' ({json.dumps(self.between)} call)*'}"]
        rules.append("call: " + " | ".join(f"f{number}" for number in range(len(schemas))))
        for number, (name, schema) in enumerate(schemas.items()):
            head, tail = json.dumps(self.opening + self._head(name)), json.dumps("}" + self.closing)
            rules.append(f"f{number}: {head} a{number} {tail}")
            rules.append(f"a{number}: %json {schema}")
        return "\n".join(rules)

    def _head(self, name: str) -> str:
        return f'{{"name": "{name}", "{self.arguments_key}": '


HERMES: Final = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments")
LLAMA3_JSON: Final = ToolFormat("llama3_json", "", "", "; ", "parameters")


@dataclass(frozen=True, slots=True)
class CallRules:
    """How calls are found in one answer: only of the functions in ``names``, only the first one if ``single``.

    With ``ends_by_call`` an answer with a call that the model has ended itself ends by ``tool_calls``.
    """

    written: ToolFormat
    names: frozenset[str]
    single: bool
    ends_by_call: bool


def format_of(wanted: ParserName, template: str, *, knows_tools: bool) -> ToolFormat:
    """The format for a model with this chat template; ``knows_tools`` says whether that writes tools.

    One that does not know them is given Hermes' instructions, so its calls are Hermes'. Raises :class:`ValueError`
    for a wish that contradicts that.
    """
    if not knows_tools:
        if wanted == "llama3_json":
            raise ValueError("the model's chat template knows no tools; they are described in Hermes' format")
        return HERMES
    if wanted != "auto":
        return HERMES if wanted == "hermes" else LLAMA3_JSON
    is_llama = HERMES.opening.strip() not in template and (PYTHON_TAG in template or '"parameters": ' in template)
    return LLAMA3_JSON if is_llama else HERMES


_INSTRUCTIONS: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, takes_system: bool = True
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: all that has to do with them is text, as Hermes has it.

    The tools stand in the system message (before the first words, where the template ``takes_system`` messages not),
    calls in the assistant's words, what they returned in the user's. Raises :class:`InvalidRequestError` for a call
    whose arguments cannot be written.
    """
    plain: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if after_tool:
                plain[-1]["content"] += f"\n{content}"
            else:
                plain.append({"role": "user", "content": content})
        else:
            calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
            text = "\n".join([content, *calls] if content else calls) if calls else content
            kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            plain.append(kept | {"content": text})
        after_tool = role == "tool"
    if tools:
        instructions = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0]['content']}\n\n{instructions}"
        elif plain and not takes_system:
            plain[0]["content"] = f"{instructions}\n\n{plain[0]['content']}"
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _written(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError("The arguments of a tool call are nested too deeply.", param="messages") from None
    return HERMES.call(function["name"], text)
