"""The model's own chat template, rendered as transformers renders it, in a sandbox.

The template comes with the model files; the messages come from anyone. Neither may reach Python objects:
jinja2's immutable sandbox holds that, and every failure inside a template is the request's (400), not ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from cluster.errors import InvalidRequestError
from router.tool_formats import plain_messages

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# A template is a program: messages that it did not expect fail in any of these ways.
_FAILURES: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's compiled template, perhaps another one for conversations with tools, and the special tokens they write.

    ``knows_tools`` if one of them writes tools; ``tool_source`` is that one's text, or else the only one's.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], tool_use: str | None = None) -> None:
        self.source = source
        self.tool_source = source if tool_use is None else tool_use
        self.special_tokens = special_tokens
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._tool_template = None if tool_use is None else environment.from_string(tool_use)
        self._takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.knows_tools = self._takes_tools or tool_use is not None

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate | None:
        """The template in a model's directory, None if it has none."""
        config = read_json_object(directory / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
        file = directory / "chat_template.jinja"
        named = _configured(config.get("chat_template"))
        if file.is_file():
            named["default"] = file.read_text("utf-8")
        for extra in (directory / "additional_chat_templates").glob("tool_use.jinja"):
            named["tool_use"] = extra.read_text("utf-8")
        return cls(named["default"], special, named.get("tool_use")) if "default" in named else None

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> str:
        """The conversation as text, open for the assistant's answer. ``tools``: None or at least one, as OpenAI's.

        A template that knows no tools is given them, and calls and their results, as text. Raises
        :class:`InvalidRequestError` if the template refuses the messages.
        """
        template = self._template
        if tools is not None and self._tool_template is not None:
            template = self._tool_template
        elif not self._takes_tools:
            messages, tools = plain_messages(messages, tools, takes_system=self._takes_system), None
        try:
            return template.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except jinja2.TemplateError as error:
            raise self._refusal(error.message) from None
        except _FAILURES:
            raise self._refusal(None) from None

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the words of a system message get into the text: some templates refuse them, some drop them."""
        words = "Be brief."
        probe = [{"role": "system", "content": words}, {"role": "user", "content": "Hello"}]
        try:
            return words in self._template.render(messages=probe, tools=None, documents=None, **self.special_tokens)
        except _FAILURES:
            return False

    def _refusal(self, reason: str | None) -> InvalidRequestError:
        text = "The model's chat template does not accept these messages"
        # Only words that stand in the template itself: a template may also build its message from the prompt.
        if reason and reason in self.source:
            return InvalidRequestError(f"{text}: {reason}", param="messages")
        return InvalidRequestError(f"{text}.", param="messages")


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a model's directory; empty if the file does not exist."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text("utf-8"))
    return content if isinstance(content, dict) else {}


def _configured(entry: Any) -> dict[str, str]:
    """``chat_template`` of tokenizer_config.json by name: one template, the default one, or a list of named ones."""
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return {"default": entry} if isinstance(entry, str) else {}


def _token_text(entry: Any) -> str | None:
    """A special token is written as its text or as an object with ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML; transformers' does not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
