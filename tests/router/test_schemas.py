"""Decoding alone: whatever arrives, the answer is a request or an InvalidRequestError that echoes nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequestError
from router import schemas
from router.schemas import decode_chat, decode_completion
from router.strict_json import translate

SECRET = "xyzzy"
FIELDS = sorted(
    set(schemas.CompletionRequest.__struct_fields__)
    | set(schemas.ChatRequest.__struct_fields__)
    | set(schemas._UNSUPPORTED_CHAT)
    | set(schemas._UNSUPPORTED_COMPLETION)
)
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 0.0, 1.5, 2**70, "", SECRET, [], {}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "function", SECRET]), inner, max_size=3)
    ),
    max_leaves=6,
)


def refused(decode: Any, body: bytes) -> InvalidRequestError | None:
    try:
        request = decode(body)
        request.prompts() if decode is decode_completion else request.conversation()
    except InvalidRequestError as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_nothing_but_our_error(fields: dict[str, Any]) -> None:
    body = json.dumps({"prompt": SECRET, "messages": [{"role": "user", "content": SECRET}]} | fields).encode()
    for decode in (decode_completion, decode_chat):
        refusal = refused(decode, body)
        if refusal is not None:
            assert SECRET not in refusal.message
            assert SECRET not in str(refusal.param)
            assert refusal.message.isascii()


@pytest.mark.parametrize("decode", [decode_completion, decode_chat])
@given(content=st.binary(max_size=60))
def test_any_bytes(decode: Any, content: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode(content)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert decode_completion(json.dumps({"prompt": prompt}).encode()).prompts() == prompts


def test_a_conversation_as_templates_read_it() -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}], "name": "n"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert decode_chat(json.dumps({"messages": messages}).encode()).conversation() == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b\nc", "name": "n"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]


def test_the_last_of_two_equal_keys_counts() -> None:
    body = b'{"prompt": "a", "max_tokens": 5, "echo": true, "max_tokens": 7, "echo": false}'
    assert decode_completion(body).max_tokens == 7


def test_only_known_forms_of_the_decoders_messages_pass() -> None:
    leaky = msgspec.ValidationError(f"Invalid enum value '{SECRET}' - at `$.messages[0].role`")
    error = translate(leaky)
    assert (error.message, error.param) == ("`messages[0].role`: not an accepted value.", "messages[0].role")


def test_a_message_names_field_and_type() -> None:
    with pytest.raises(InvalidRequestError) as failure:
        decode_completion(b'{"prompt": "a", "max_tokens": "xyzzy"}')
    assert failure.value.message == "`max_tokens`: expected int | null, got str."
    with pytest.raises(InvalidRequestError) as failure:
        decode_chat(b"{}")
    assert failure.value.message == "`messages` is required."
