"""What ``/openapi.json`` says and what the server does: the same routes, statuses, content types and fields."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_generator import FakeGenerator, deltas
from front_harness import MODEL, Front

from cluster.api_keys import ApiKey, KeyRing, digest_of
from cluster.errors import DeadlineError, EngineError, NoUsablePairError, OverloadedError
from cluster.request import MAX_CHOICES
from router import replies
from router.app import FrontSettings, create_app
from router.generation import Readiness
from router.metrics import Metrics
from router.openapi import ROUTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def document(front: Front) -> dict[str, Any]:
    response = await front.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


async def test_every_route_is_declared_and_every_declared_route_exists(front: Front) -> None:
    said = await document(front)
    app = front.app
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert {(path, method) for path, methods in said["paths"].items() for method in methods} == served


async def test_all_references_lead_somewhere(front: Front) -> None:
    said = await document(front)

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            here = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return here + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    found = references(said)
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in said["components"]["schemas"]


# (method, path, body, status): each status that a test can bring about without nodes.
ANSWERS: list[tuple[str, str, Any, int]] = [
    ("post", CHAT, {"messages": HELLO}, 200),
    ("post", CHAT, {"messages": HELLO, "stream": True}, 200),
    ("post", CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}, 200),
    ("post", COMPLETIONS, {"prompt": ["a", "b"], "echo": True, "stop": "x"}, 200),
    ("post", COMPLETIONS, {"prompt": "a", "stream": True}, 200),
    ("post", COMPLETIONS, {"prompt": "a", "return_token_ids": True}, 200),
    ("post", COMPLETIONS, {"prompt": "a", "n": 0}, 400),
    ("get", "/v1/models", None, 200),
    ("get", f"/v1/models/{MODEL}", None, 200),
    ("get", "/v1/models/other", None, 404),
    ("post", "/tokenize", {"prompt": "a"}, 200),
    ("post", "/tokenize", {"prompt": "a", "return_token_strs": True}, 200),
    ("post", "/detokenize", {"tokens": [5]}, 200),
    ("get", "/tokenizer_info", None, 200),
    ("get", "/health", None, 200),
    ("get", "/ready", None, 200),
    ("get", "/metrics", None, 200),
    ("get", "/version", None, 200),
    ("get", "/openapi.json", None, 200),
    *[("post", path, {"model": "other", "prompt": "a", "messages": HELLO}, 404) for path in (CHAT, COMPLETIONS)],
    *[("post", path, {"prompt": 5.5, "tokens": 5}, 400) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")],
    *[("post", path, "form", 415) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")],
    *[("post", path, "large", 413) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")],
    *[("put", path, {}, 405) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models", "/health")],
]
TYPES = {
    (route.path, status, kind): of
    for route in ROUTES
    for status, kinds in route.answers.items()
    for kind, of in kinds.items()
}


def declared(said: dict[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    template = "/v1/models/{model_id}" if path.startswith("/v1/models/") else path
    methods = said["paths"][template]
    content: dict[str, Any] = methods.get(method, next(iter(methods.values())))["responses"][str(status)]["content"]
    return content


@pytest.mark.parametrize(("method", "path", "body", "status"), ANSWERS)
async def test_answers_are_as_declared(front: Front, method: str, path: str, body: Any, status: int) -> None:
    front.generator.script = deltas([100, 101], "length")
    if body == "form":
        response = await front.http.request(method, path, content=b"a=b")
    elif body == "large":
        large = {"prompt": "x" * (1 << 20)}
        response = await front.http.request(method, path, json=large)
    else:
        response = await front.http.request(method, path, json=body)
    assert response.status_code == status, response.text
    content = declared(await document(front), method, path, status)
    kind = response.headers["content-type"].partition(";")[0]
    assert kind in content
    template = "/v1/models/{model_id}" if path.startswith("/v1/models/") else path
    if status != 200:
        strict(response.content, replies.ErrorReply)
    elif kind == "application/json" and (of := TYPES[template, status, kind]) is not None:
        strict(response.content, of)
    elif kind == "text/event-stream":
        of = replies.ChatChunk if path == CHAT else replies.CompletionReply
        for event in response.text.split("\n\n")[:-2]:
            strict(event.removeprefix("data: ").encode(), of)


async def test_calls_of_tools_are_as_declared(front: Front) -> None:
    front.replay('Look: <tool_call>{"name": "f", "arguments": {}}</tool_call>', "stop", per_delta=100)
    body = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}
    whole = await front.http.post(CHAT, json=body)
    assert whole.json()["choices"][0]["message"]["tool_calls"]
    strict(whole.content, replies.ChatReply)
    stream = await front.http.post(CHAT, json=body | {"stream": True})
    assert '"tool_calls":[' in stream.text
    for event in stream.text.split("\n\n")[:-2]:
        strict(event.removeprefix("data: ").encode(), replies.ChatChunk)
    schemas = (await document(front))["components"]["schemas"]
    assert "tool_calls" in json.dumps(schemas["ChatChoice"]["properties"]["finish_reason"])
    assert "tool_calls" not in json.dumps(schemas["CompletionChoice"]["properties"]["finish_reason"])
    for name in ("AssistantMessage", "Delta"):
        assert "null" in json.dumps(schemas[name]["properties"]["content"])
        assert "tool_calls" in schemas[name]["properties"]
    (tools,) = [kind for kind in schemas["ChatRequest"]["properties"]["tools"]["anyOf"] if kind["type"] == "array"]
    assert (tools["minItems"], tools["maxItems"]) == (1, 128)
    assert schemas["OfferedFunction"]["properties"]["name"]["pattern"] == "^[A-Za-z0-9_-]{1,64}$"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "error", [OverloadedError("full"), EngineError("bug"), NoUsablePairError("none"), DeadlineError("late")]
)
async def test_failures_are_as_declared(front: Front, path: str, error: Any) -> None:
    front.generator.script = [error]
    response = await front.http.post(path, json={"prompt": "a", "messages": HELLO})
    assert response.status_code == error.status
    assert "application/json" in declared(await document(front), "post", path, error.status)


async def test_refusals_for_keys_are_as_declared(front: Front) -> None:
    key = "sk-test-0123456789"
    holder = ApiKey("one", digest_of(key.encode()), cache_salt="s", max_concurrent=0)
    settings = FrontSettings(served_name=MODEL, max_model_len=64, version="0")
    app = create_app(settings, front.tokenizer, FakeGenerator(), Metrics(), keys=KeyRing([holder]))
    said = await document(front)
    assert said["security"] == [{name: []} for name in said["components"]["securitySchemes"]] + [{}]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        for path, methods in said["paths"].items():
            for method, operation in methods.items():
                stranger = await http.request(method, path)
                assert (stranger.status_code == 401) == ("401" in operation["responses"]), path
                assert (stranger.status_code == 401) == ("security" not in operation), path
                if stranger.status_code == 401:
                    strict(stranger.content, replies.ErrorReply)
                limited = await http.request(method, path, headers={"authorization": f"Bearer {key}"}, json={})
                assert (limited.status_code == 429) == ("429" in operation["responses"]), path


async def test_not_ready_is_as_declared(front: Front) -> None:
    front.generator.readiness = Readiness(False, "no nodes")
    response = await front.http.get("/ready")
    assert response.status_code == 503
    assert "application/json" in declared(await document(front), "get", "/ready", 503)
    strict(response.content, replies.ReadyReply)


def strict(content: bytes, of: Any) -> None:
    """Decodes as the declared type, and encodes again to the same object: no field more, none less."""
    decoded = msgspec.json.decode(content, type=of)
    assert json.loads(msgspec.json.encode(decoded)) == json.loads(content)


async def test_requests_declare_their_bounds(front: Front) -> None:
    schema = (await document(front))["components"]["schemas"]["ChatRequest"]
    bounds = {"temperature": (0, 2), "top_logprobs": (0, 20), "presence_penalty": (-2, 2), "logit_bias": None}
    bounds |= {"n": (1, MAX_CHOICES)}
    for name, expected in bounds.items():
        if expected is not None:
            (numeric,) = [kind for kind in schema["properties"][name]["anyOf"] if kind["type"] != "null"]
            assert (numeric["minimum"], numeric["maximum"]) == expected
    assert schema["required"] == ["messages"]
