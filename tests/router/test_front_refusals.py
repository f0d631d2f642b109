"""Bad requests: each gets one clear 4xx in OpenAI's shape, names its field, echoes nothing and breaks nothing."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import openai
import pytest
from front_harness import CHAT, COMPLETIONS, CONTEXT, HELLO, MODEL, SECRET, Front, check_refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(front: Front, path: str, content: bytes | str, **headers: str) -> httpx.Response:
    kind = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return await front.http.post(path, content=content, headers=kind)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"xyzzy"',
        b"1",
        b"{",
        b"{}",
        b'{"prompt": "xyzzy"',
        b'{"prompt": "xyzzy",}',
        b"{'prompt': 'xyzzy'}",
        b'{"prompt": "xyzzy"} x',
        b'{"prompt": "xyzzy\xff"}',
        b'{"other\xff": 1, "prompt": "xyzzy", "messages": []}',
        '{"prompt": "xyzzy"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"prompt": "xyzzy"}',
        b'{"prompt": "xyzzy \\ud800"}',
        b'{"prompt": "xyzzy \\udc00"}',
        b'{"prompt": "xyzzy \\ud800\\ud800"}',
        b'{"messages": [{"role": "user", "content": "xyzzy \\ud800"}]}',
        b'{"user": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"user": ' + b"[" * 500_000,
        b'{"user": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"user": "' + b'\\"' * 300_000,
    ],
    ids=range(24),
)
async def test_h5_h7_bodies_that_are_no_request(front: Front, path: str, content: bytes) -> None:
    await check_refusal(front, await post(front, path, content), 400)


_SHARED = [
    ("max_tokens", values)
    for values in ("0", "-1", "true", '"5"', "2.0", "1.5", "1e18", str(2**70), "9" * 5000, "[1]", "NaN", '"xyzzy"')
]
_SHARED += [("temperature", v) for v in ("-0.1", "2.1", "NaN", "Infinity", "-Infinity", "1e400", "true", '"xyzzy"')]
_SHARED += [("top_p", v) for v in ("0", "0.0", "1.1", "-1", "NaN", "false", '"1"')]
_SHARED += [("seed", v) for v in (str(2**63), str(-(2**63) - 1), "1.0", "true", '"xyzzy"')]
_SHARED += [("n", v) for v in ("0", "-1", "true", '"5"', "2.0", "129", "1e6", str(2**31), str(2**63), str(2**70))]
_SHARED += [("stop", v) for v in ("1", "{}", "[1]", "[null]", json.dumps(["xyzzy"[:4] + str(i) for i in range(65)]))]
_SHARED += [("stop", json.dumps("é" * 513))]
_SHARED += [("stop_token_ids", v) for v in ("[-1]", "[49152]", "[1.0]", "[true]", "5", json.dumps([1] * 257))]
_SHARED += [("stream", v) for v in ("1", '"true"', "[]")]
_SHARED += [("stream_options", v) for v in ('{"include_usage": true}', "5", '{"include_usage": 1}')]
_SHARED += [("model", v) for v in ("5", "[]", "{}")]
_SHARED += [("ignore_eos", "1"), ("return_token_ids", '"xyzzy"'), ("cache_salt", '"' + "x" * 257 + '"')]
_SHARED += [("min_tokens", v) for v in ("-1", "false", "1.0", str(2**31), "5000")]
_SHARED += [("top_k", v) for v in ("-2", "1.0", "false", str(2**70), '"xyzzy"')]
_SHARED += [("min_p", v) for v in ("-0.1", "1.1", "NaN", "1e400", "true")]
_SHARED += [("repetition_penalty", v) for v in ("0", "-1", "1e-320", "1e10", "Infinity", "true")]
_SHARED += [("frequency_penalty", v) for v in ("-2.1", "2.1", "NaN", "true", '"xyzzy"')]
_SHARED += [("presence_penalty", v) for v in ("-2.1", "2.1", "-Infinity", "[]")]
_SHARED += [("logit_bias", v) for v in ('{"5": 101}', '{"5": -101}', '{"5": NaN}', '{"5": true}', "[]", "5")]
_SHARED += [
    ("logit_bias", json.dumps({key: 1})) for key in ("xyzzy", "-1", "49152", "05", "5.0", "", "9" * 5000, "\u0665")
]
_SHARED += [("logit_bias", json.dumps({str(key): 1 for key in range(4097)}))]
_SHARED += [("allowed_token_ids", v) for v in ("[]", "[-1]", "[49152]", "[1.0]", "[true]", "5", f"[{2**40}]")]
_SHARED += [("include_stop_str_in_output", "1"), ("skip_special_tokens", '"xyzzy"'), ("skip_special_tokens", "0")]
_SHARED += [("spaces_between_special_tokens", "0"), ("echo", "0")]
_SHARED += [("bad_words", v) for v in ('""', '[""]', '["a", " \\t"]', "[1]", "5", '"xyzzy"', json.dumps(["é" * 129]))]
_SHARED += [("truncate_prompt_tokens", v) for v in ("0", "-2", "true", "1.0", '"xyzzy"')]
_SHARED += [("bad_words", json.dumps(["x"] * 257))]
_SHARED += [
    ("prompt_logprobs", '"xyzzy"'),
    ("prompt_logprobs", "true"),
    ("guided_json", '"xyzzy"'),
    ("guided_json", "5"),
    ("guided_regex", '"((("'),
]
_SHARED += [("guided_choice", v) for v in ("[]", "[1]", '"xyzzy"')] + [
    ("guided_grammar", v) for v in ('"%%"', '""', "1")
]
_SHARED += [
    ("response_format", v)
    for v in (
        '{"type": "xyzzy"}',
        '"text"',
        "[]",
        '{"type": "json_schema"}',
        '{"type": "json_schema", "json_schema": {}}',
    )
]
_SHARED += [
    ("structured_outputs", v)
    for v in ('"xyzzy"', '{"regex": "a", "choice": ["b"]}', '{"json": {"type": "nope"}}', '{"grammar": "nope"}')
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), _SHARED, ids=[f"{field}-{value[:24]}" for field, value in _SHARED])
async def test_c3_c4_c10_fields_of_both_endpoints(front: Front, path: str, field: str, value: str) -> None:
    prompt = f'"messages": {json.dumps(HELLO)}' if path == CHAT else f'"prompt": "{SECRET}"'
    error = await check_refusal(front, await post(front, path, f'{{{prompt}, "{field}": {value}}}'), 400)
    assert error["type"] == "invalid_request_error"
    if "NaN" not in value and "Infinity" not in value:  # these are no JSON: there is no field to name
        assert str(error["param"]).partition("[")[0].partition(".")[0] == field
        assert field in error["message"]


@pytest.mark.parametrize(
    "value",
    [
        "null", '""', "[]", "[[]]", '[""]', '["xyzzy", ""]', "[[1], []]", '["xyzzy", 1]', '[1, "xyzzy"]',
        "[true]", "[1.0]", "[-1]", "[49152]", "[[49152]]", "[1, [1]]", "[null]", "5", "{}", '[["xyzzy"]]', "[[[1]]]",
        "[9999999999999999999999]", json.dumps(["x"] * 129),
    ],
)  # fmt: skip
async def test_l1_prompts(front: Front, value: str) -> None:
    error = await check_refusal(front, await post(front, COMPLETIONS, f'{{"prompt": {value}}}'), 400)
    assert str(error["param"]).startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 0),
        ("best_of", 2),
        ("best_of", True),
        ("best_of", 2**63),
        ("suffix", SECRET),
        ("logprobs", 21),
        ("logprobs", 49152),
        ("logprobs", -1),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("echo", "true"),
        ("add_special_tokens", 1),
        ("max_tokens", 0),
    ],
)
async def test_l3_l4_l5_fields_of_completions(front: Front, field: str, value: Any) -> None:
    response = await front.http.post(COMPLETIONS, json={"prompt": SECRET, field: value})
    assert (await check_refusal(front, response, 400))["param"] == field


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("xyzzy", "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "xyzzy", "content": "a"}], "messages[0].role"),
        ([{"role": 5, "content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([*HELLO, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "xyzzy"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "xyzzy"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["xyzzy"]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "xyzzy"}]}], "messages[0].tool_calls[0].function"),
        (["xyzzy"], "messages[0]"),
    ],
)
async def test_c1_messages(front: Front, messages: Any, param: str) -> None:
    response = await front.http.post(CHAT, json={"messages": messages})
    assert (await check_refusal(front, response, 400))["param"] == param


async def test_c2_a_content_part_is_named(front: Front) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        await front.client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tools", "xyzzy"),
        ("tools", {}),
        ("tool_choice", "required"),
        ("tool_choice", "auto"),
        ("tool_choice", "xyzzy"),
        ("tool_choice", {"type": "function", "function": {"name": "xyzzy"}}),
        ("tool_choice", ["none"]),
        ("parallel_tool_calls", "xyzzy"),
        ("parallel_tool_calls", 1),
        ("functions", [{"name": "xyzzy"}]),
        ("function_call", "auto"),
        ("logprobs", 1),
        ("logprobs", SECRET),
        ("top_logprobs", 5),
        ("echo", True),
        ("chat_template", "{{ xyzzy }}"),
        ("chat_template_kwargs", {"xyzzy": 1}),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("modalities", ["audio"]),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", "xyzzy"),
    ],
)
async def test_c5_c6_c7_fields_of_chat(front: Front, field: str, value: Any) -> None:
    response = await front.http.post(CHAT, json={"messages": HELLO, field: value})
    assert (await check_refusal(front, response, 400))["param"] == field


async def test_two_forms_of_answer_cannot_be_had_at_once(front: Front) -> None:
    body = {"messages": HELLO, "response_format": {"type": "json_object"}, "guided_choice": ["a"]}
    error = await check_refusal(front, await front.http.post(CHAT, json=body), 400)
    assert error["param"] == "guided_choice"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [1] * CONTEXT}),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT + 100), "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [1] * (CONTEXT - 9), "max_tokens": 10}),
        (COMPLETIONS, {"prompt": [[1], [1] * CONTEXT]}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2**31 - 1}),
        (COMPLETIONS, {"prompt": f"{SECRET} " * CONTEXT}),
        (COMPLETIONS, {"prompt": f"{SECRET} " * 100_000}),
        (CHAT, {"messages": HELLO, "max_tokens": CONTEXT}),
        (CHAT, {"messages": HELLO, "max_completion_tokens": CONTEXT, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": f"{SECRET} " * CONTEXT}]}),
        (CHAT, {"messages": [{"role": "user", "content": f"{SECRET} " * 100_000}], "stream": True}),
    ],
)
async def test_c3_overflow(front: Front, path: str, body: dict[str, Any]) -> None:
    error = await check_refusal(front, await front.http.post(path, json=body), 400, "context_length_exceeded")
    assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
    assert "context_length_exceeded" in error["message"]


async def test_a_small_pool_limits_the_request(front: Front) -> None:
    front.generator.max_tokens = 32
    response = await front.http.post(COMPLETIONS, json={"prompt": [1] * 30, "max_tokens": 3})
    error = await check_refusal(front, response, 400, "context_length_exceeded")
    assert "maximum context length is 32 tokens" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_m4_an_unknown_model(front: Front, path: str) -> None:
    response = await front.http.post(path, json={"model": SECRET, "prompt": "x", "messages": HELLO})
    await check_refusal(front, response, 404, "model_not_found")


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "text/plain"},
        {"content_type": ""},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "multipart/form-data; boundary=xyzzy"},
        {"content_type": "application/json; charset=utf-16"},
        {"content_encoding": "gzip"},
        {"content_encoding": "br"},
    ],
)
async def test_t4_t5_media_types(front: Front, headers: dict[str, str]) -> None:
    content = gzip.compress(b'{"prompt": "x"}') if headers.get("content_encoding") else b'{"prompt": "xyzzy"}'
    await check_refusal(front, await post(front, COMPLETIONS, content, **headers), 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", 'APPLICATION/JSON;charset="UTF-8"'])
async def test_t4_json_media_types_pass(front: Front, kind: str) -> None:
    front.replay("x")
    assert (await post(front, COMPLETIONS, b'{"prompt": "x"}', content_type=kind)).status_code == 200


async def test_t6_a_large_body(front: Front) -> None:
    body = {"prompt": SECRET * (1 << 18)}
    await check_refusal(front, await front.http.post(COMPLETIONS, json=body), 413, "request_too_large")


async def test_t6_a_large_body_of_undeclared_length(front: Front) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * (1 << 15)

    headers = {"content-type": "application/json"}
    response = await front.http.post(COMPLETIONS, content=chunks(), headers=headers)
    await check_refusal(front, response, 413, "request_too_large")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/responses", "/xyzzy", "/docs", "/v1/messages"])
async def test_t2_h2_unknown_paths(front: Front, path: str) -> None:
    await check_refusal(front, await front.http.get(path), 404, "not_found")
    front.generator.reset()
    await check_refusal(front, await front.http.post(path, json={}), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", COMPLETIONS), ("DELETE", "/v1/models"), ("POST", "/health")]
)
async def test_t2_wrong_methods(front: Front, method: str, path: str) -> None:
    response = await front.http.request(method, path)
    assert response.headers["allow"]
    await check_refusal(front, response, 405, "method_not_allowed")


async def test_refusals_are_counted_once(front: Front) -> None:
    invalid, ok = front.metrics.count("completions", "invalid"), front.metrics.count("completions", "ok")
    await check_refusal(front, await front.http.post(COMPLETIONS, json={"prompt": ""}), 400)
    assert front.metrics.count("completions", "invalid") == invalid + 1
    assert front.metrics.count("completions", "ok") == ok + 1  # check_refusal's own
