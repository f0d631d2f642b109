"""Ids and chat texts against transformers, which runs the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.processors

from cluster.errors import ContextLengthError, InvalidRequestError
from router.chat_template import ChatTemplate
from router.tokenizer import Tokenizer

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}],
    [
        {"role": "user", "content": "  東京 👩‍👩‍👧\n"},
        {"role": "assistant", "content": "<|im_end|> {{ x }}"},
        {"role": "user", "content": "{% raw %} &amp; <b>"},
    ],
]


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_directory)


@pytest.mark.parametrize("messages", CONVERSATIONS)
async def test_chats_as_transformers_writes_them(
    tokenizer: Tokenizer, reference: Any, messages: list[dict[str, Any]]
) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(await tokenizer.encode_chat(messages, max_tokens=8192)) == expected


@pytest.mark.parametrize(
    ("more", "in_thread"),
    [
        ([], False),
        ([{"role": "user", "content": "x " * 5000}], True),
        ([{"role": "user", "content": "x"}] * 200, True),
        ([{"role": "assistant", "content": "", "reasoning": "x " * 5000}], True),
    ],
    ids=["short", "long", "many", "something else"],
)
async def test_only_work_worth_a_thread_goes_to_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, more: list[dict[str, Any]], in_thread: bool
) -> None:
    handed_over = []

    async def note(function: Any, *arguments: Any) -> Any:
        handed_over.append(function)
        return function(*arguments)

    monkeypatch.setattr("asyncio.to_thread", note)
    messages = [{"role": "user", "content": "Hello"}, *more]
    token_ids = await tokenizer.encode_chat(messages, max_tokens=8192)
    assert len(token_ids) > len(messages)
    assert bool(handed_over) == in_thread


@pytest.mark.parametrize("text", ["Hello", "  a  b\n\n", "東京 👩‍👩‍👧", "<|im_start|>user", "x" * 20_000])
async def test_prompts_as_transformers_reads_them(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert list(await tokenizer.encode_prompt(text, max_tokens=8192)) == reference(text)["input_ids"]


async def test_text_that_cannot_fit_is_not_tokenised(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextLengthError, match="maximum context length is 10 tokens"):
        await tokenizer.encode_prompt("x" * 100_000, max_tokens=10)


async def test_a_model_without_a_template(model_directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    bare = Tokenizer(backend, vocab_size=49152, eos_token_ids=(2,))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await bare.encode_chat(CONVERSATIONS[0], max_tokens=100)
    assert len(await bare.encode_prompt("one two three four", max_tokens=100)) == 4


async def test_special_tokens_come_once(model_directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    template = ChatTemplate("{{ bos_token }}{{ messages[0]['content'] }}", {"bos_token": "<|im_start|>"})
    adding = Tokenizer(backend, vocab_size=49152, eos_token_ids=(2,), chat_template=template)
    prompt = await adding.encode_prompt("Hello", max_tokens=10)
    assert prompt[0] == 1
    assert await adding.encode_chat(CONVERSATIONS[0], max_tokens=10) == prompt


@pytest.mark.parametrize("keep", [1, 2, 5, 100])
async def test_special_tokens_stay_where_a_prompt_is_cut(model_directory: Path, keep: int) -> None:
    """As transformers has it: what the post-processor adds is not what is cut off."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, truncation_side="left")
    text = "The lighthouse keeper had a dog"
    wanted = reference(text, truncation=True, max_length=keep)["input_ids"]
    adding = Tokenizer(backend, vocab_size=49152, eos_token_ids=(2,))
    assert list(await adding.encode_prompt(text, max_tokens=10, keep=keep)) == wanted
    bare = await adding.encode_prompt(text, max_tokens=10, add_special_tokens=False, keep=keep)
    assert bare == (await adding.encode_prompt(text, max_tokens=10, add_special_tokens=False))[-keep:]


def render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or CONVERSATIONS[0])


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}{% generation %}a{% endgeneration %}") == "<s>a"
    assert render("  {% if add_generation_prompt %}\nyes\n{% endif %}\n") == "yes\n"
    assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": "<é>"}]).endswith('"<é>"}')
    assert render("{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}", CONVERSATIONS[2]) == "1"
    assert render("{% if tools is none %}{{ strftime_now('%Y') | length }}{% endif %}") == "4"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ raise_exception('no: ' + messages[0]['content']) }}",
        "{{ messages[0]['content'] + none }}",
        "{{ messages[9]['content'].x.y }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ range(10**9) | list }}",
        "{{ '%d' % messages[0]['content'] }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_a_template_that_fails_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not accept these messages") as failure:
        render(source, [{"role": "user", "content": "xyzzy"}])
    assert "xyzzy" not in failure.value.message
    assert ("Roles must alternate" in failure.value.message) == ("Roles" in source)


@pytest.mark.parametrize(
    ("config", "file", "shown"),
    [
        ({"chat_template": "a"}, None, "a"),
        ({"chat_template": "a"}, "b", "b"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
        ({"chat_template": "{{ eos_token }}", "eos_token": {"content": "</s>"}}, None, "</s>"),
        ({}, None, None),
        (None, None, None),
    ],
)
def test_where_templates_are_kept(tmp_path: Path, config: Any, file: str | None, shown: str | None) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    template = ChatTemplate.from_directory(tmp_path)
    assert (None if template is None else template.render(CONVERSATIONS[0])) == shown
