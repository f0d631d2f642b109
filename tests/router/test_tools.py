"""Tools in prompts, as transformers writes them; formats; and grammars that let pass calls and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from cluster.model_store import read_config
from cluster.request import Grammar, RequestId, RequestKey
from engine.grammar import GrammarError, Grammars
from router.__main__ import main
from router.chat_template import ChatTemplate
from router.conversation import ChatMessage, template_messages
from router.grammars import compile_grammar
from router.schemas import decode_chat
from router.tokenizer import Tokenizer
from router.tool_formats import HERMES, LLAMA3_JSON, ParserName, ToolFormat, plain_messages
from router.tools import ToolUse, shown

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Look <out>.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "any-thing", "parameters": {}}},
]
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
]
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "assistant", "content": "Rain at noon."},
    {"role": "user", "content": "Thanks"},
]
HERMES_TEMPLATE = """\
{%- if tools %}[system]{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
<tool_call>{"name": ...}</tool_call>[end]{% endif %}
{%- for message in messages %}
[{{ message.role }}]{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
LLAMA_TEMPLATE = """\
{%- if tools is not none %}Respond as {"name": function name, "parameters": its arguments}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- for call in message.tool_calls %}{{ call.function.arguments | items | list | length }}{% endfor %}
{%- else %}{{ message['content'] | trim }}{% endif %}{% endfor %}"""


def use(**fields: Any) -> ToolUse | None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return decode_chat(json.dumps(body).encode()).tool_use()


def messages(raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return template_messages(msgspec.convert(raw, list[ChatMessage]))


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_directory)


@pytest.mark.parametrize("source", [HERMES_TEMPLATE, LLAMA_TEMPLATE])
@pytest.mark.parametrize("with_tools", [False, True])
def test_templates_are_given_tools_and_calls_as_transformers_gives_them(
    reference: Any, source: str, with_tools: bool
) -> None:
    asked = use(tools=TOOLS)
    assert asked is not None
    tools = [shown(function) for function in asked.functions] if with_tools else None
    # What transformers' users write: objects for arguments, strings for contents, a schema for every tool.
    objects = [dict(message) for message in HISTORY]
    objects[2] |= {
        "content": "",
        "tool_calls": [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}  # type: ignore[dict-item]
            for call in CALLS
        ],
    }
    objects[4] |= {"content": "noon"}
    expected = reference.apply_chat_template(
        objects, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(source, {}).render(messages(HISTORY), tools) == expected
    assert ("get_weather" in expected.partition("Be brief")[0]) == with_tools


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.knows_tools
    assert (template.render(messages(HISTORY)), template.render(messages(HISTORY), TOOLS)) == ("plain", "3 tools")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file {{ tools | length }}")
    (tmp_path / "chat_template.jinja").write_text("default file")
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert (template.render(messages(HISTORY)), template.render(messages(HISTORY), TOOLS)) == ("default file", "file 3")


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_template_that_knows_no_tools_sees_text() -> None:
    text = ChatTemplate(PLAIN, {}).render(messages(HISTORY), TOOLS)
    assert text.startswith("[system]Be brief.\n\n# Tools\n")
    assert "".join(f"\n{json.dumps(tool)}" for tool in TOOLS) + "\n</tools>" in text
    calls = HERMES.call("get_weather", '{"city": "Zürich"}') + "\n" + HERMES.call("now", "{}")
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert text.endswith(f"[user]Weather?[assistant]{calls}[user]{results}[assistant]Rain at noon.[user]Thanks")
    without = ChatTemplate(PLAIN, {}).render(messages(HISTORY))
    assert without.startswith("[system]Be brief.[user]Weather?[assistant]<tool_call>")


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no system') }}", ""])
def test_a_template_without_system_messages_has_the_tools_in_the_first_words(refusal: str) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        + refusal
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    text = ChatTemplate(source, {}).render(messages(HISTORY[1:2]), TOOLS)
    assert text.startswith("# Tools")
    assert text.endswith("</tool_call>\n\nWeather?")


def test_no_message_is_changed_where_nothing_has_to_do_with_tools() -> None:
    plain = messages([HISTORY[0], HISTORY[1], HISTORY[5]])
    assert plain_messages(plain, None) == plain
    before = json.dumps(plain)
    plain_messages(plain, TOOLS)
    assert json.dumps(plain) == before


def test_arguments_that_are_no_shallow_json_are_shown_as_the_text_that_they_are() -> None:
    for text in ('{"a":' * 100_000 + "1" + "}" * 100_000, "{'a': 1}", "NaN", '"\\ud800"'):
        call = {"type": "function", "function": {"name": "now", "arguments": text}}
        turns = messages([HISTORY[1], {"role": "assistant", "content": None, "tool_calls": [call]}])
        assert text in ChatTemplate(PLAIN, {}).render(turns, TOOLS)
        assert json.dumps(text) in ChatTemplate(HERMES_TEMPLATE, {}).render(turns, TOOLS)


@pytest.mark.parametrize(
    ("wanted", "source", "expected"),
    [
        ("auto", HERMES_TEMPLATE, HERMES),
        ("auto", LLAMA_TEMPLATE, LLAMA3_JSON),
        ("auto", "{{ tools }}<|python_tag|>", LLAMA3_JSON),
        ("auto", "{{ tools }}", HERMES),
        ("auto", PLAIN, HERMES),
        ("hermes", PLAIN, HERMES),
        ("hermes", LLAMA_TEMPLATE, HERMES),
        ("llama3_json", HERMES_TEMPLATE, LLAMA3_JSON),
        ("llama3_json", PLAIN, None),
        ("auto", None, HERMES),
    ],
)
def test_which_format(
    model_directory: Path, wanted: ParserName, source: str | None, expected: ToolFormat | None
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    template = None if source is None else ChatTemplate(source, {})
    tokenizer = Tokenizer(backend, vocab_size=49152, eos_token_ids=(2,), chat_template=template)
    if expected is None:
        with pytest.raises(ValueError, match="knows no tools"):
            tokenizer.tool_format(wanted)
    else:
        assert tokenizer.tool_format(wanted) == expected


def test_a_router_does_not_start_with_a_format_that_its_model_is_not_told_of(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("router.__main__.setup_logging", lambda _process: None)  # pytest's handlers stay
    options = ["--model", str(model_directory), "--redis", "redis://127.0.0.1:1/0", "--tool-call-parser", "llama3_json"]
    monkeypatch.setattr(sys, "argv", ["router", *options])
    assert main() == 2
    assert "--tool-call-parser llama3_json" in capsys.readouterr().err


def test_markers_are_seen_where_they_are_special_tokens(model_directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    text = HERMES.call("now", '{"city": "é"}') + "<|im_end|>"
    ids = backend.encode(text, add_special_tokens=False).ids
    for decoder in (None, tokenizers.decoders.Fuse()):
        if decoder is not None:
            backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel(), decoder])
        tokenizer = Tokenizer(backend, vocab_size=49152 + 2, eos_token_ids=(2,))
        for markers, expected in (((), text[len("<tool_call>") :]), (HERMES.markers, text)):
            detokenizer = tokenizer.detokenizer(markers=markers)
            shown_text = "".join([detokenizer.feed(token_id) for token_id in ids] + [detokenizer.flush()])
            assert shown_text == expected.replace("<|im_end|>", "").replace(
                "</tool_call>", "</tool_call>" * bool(markers)
            )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"tool_choice": "none"}, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": TOOLS}, ("auto", True, None)),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, ("auto", False, None)),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True}, ("required", True, None)),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}, ("named", False, "now")),
        # A form of answer and free calls: the answer has the form.
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, ("auto", True, None)),
    ],
)
def test_what_is_asked_for(fields: dict[str, Any], expected: Any) -> None:
    found = use(**fields)
    assert (None if found is None else (found.choice, found.parallel, found.named)) == expected


@pytest.fixture(scope="module")
def grammars(model_directory: Path) -> Grammars:
    facts = read_config(model_directory)
    return Grammars(model_directory / "tokenizer.json", facts.vocab_size, facts.eos_token_ids)


def follows(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the grammar lets the model write that and then end."""
    ids = [*tokenizer._backend.encode(text, add_special_tokens=False).ids, *tokenizer.eos_token_ids[:1]]
    key = RequestKey(RequestId(f"{grammar.text} {text}"), 0)  # states are kept by request
    try:
        return all(grammars.allowed(key, 0, grammar, ids[:count])[ids[count]] for count in range(len(ids)))
    except GrammarError:
        return False


PARIS, DAYS = '{"city": "Paris"}', '{"city": "Paris", "days": 3}'


@pytest.mark.parametrize("written", [HERMES, LLAMA3_JSON])
@pytest.mark.parametrize(
    ("choice", "parallel", "calls", "possible"),
    [
        ("required", True, [("get_weather", PARIS)], True),
        ("required", True, [("get_weather", DAYS), ("now", "{}"), ("any-thing", '{"x": [1, {}]}')], True),
        ("required", False, [("now", "{}")], True),
        ("required", False, [("now", "{}"), ("now", "{}")], False),
        ("named", True, [("now", "{}")], True),
        ("named", True, [("now", "{}"), ("now", "{}")], False),
        ("named", True, [("get_weather", PARIS)], False),
        ("required", True, [], False),
        ("required", True, [("other", "{}")], False),
        ("required", True, [("get_weather", "{}")], False),
        ("required", True, [("get_weather", '{"city": "paris"}')], False),
        ("required", True, [("get_weather", '{"city": "Paris", "days": 10}')], False),
        ("required", True, [("get_weather", '{"city":  "Paris"}')], False),
        ("required", True, [("now", '{"a": 1}')], False),
        ("required", True, [("any-thing", "[]")], False),
        ("required", True, [("any-thing", '"x"')], False),
    ],
)
def test_forced_calls_follow_their_schemas(
    grammars: Grammars,
    tokenizer: Tokenizer,
    written: ToolFormat,
    choice: str,
    parallel: bool,
    calls: list[tuple[str, str]],
    possible: bool,
) -> None:
    wanted: Any = {"type": "function", "function": {"name": "now"}} if choice == "named" else choice
    asked = use(tools=TOOLS, tool_choice=wanted, parallel_tool_calls=parallel)
    assert asked is not None
    grammar = compile_grammar(asked.wish(written))
    text = written.between.join(written.call(name, arguments) for name, arguments in calls)
    assert follows(grammars, tokenizer, grammar, text) == possible
    assert not follows(grammars, tokenizer, grammar, f"Hello {text}")


def test_as_many_tools_as_may_be_sent_can_be_forced() -> None:
    many = [{"type": "function", "function": {"name": f"f{number}", "parameters": CITY}} for number in range(128)]
    asked = use(tools=many, tool_choice="required")
    assert asked is not None
    assert compile_grammar(asked.wish(HERMES)).kind == "lark"
