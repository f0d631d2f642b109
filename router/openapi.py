"""``/openapi.json``, drawn from the very types that requests are decoded into and answers are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from router import replies
from router.access import OPEN_PATHS
from router.schemas import ChatRequest, CompletionRequest
from router.tokenizing import DetokenizeRequest, TokenizeRequest

SSE: Final = "text/event-stream"
JSON: Final = "application/json"
METRICS: Final = "text/plain"

_ERRORS: Final = {
    400: "The request is malformed, mistyped, out of range or longer than the model's context",
    401: "The server has API keys, and none of them came with the request",
    404: "No such model or path",
    405: "The path does not take this method",
    413: "The body is too large",
    415: "The body is not plain application/json",
    429: "The queue is full, or the API key's limit reached; come back after Retry-After seconds",
    500: "A failure of ours",
    503: "No nodes, or a node was lost; come back after Retry-After seconds",
    504: "The request's time is up",
}
_READS: Final = (400, 404, 405, 500)
_POSTS: Final = (400, 404, 405, 413, 415, 429, 500)
_GENERATES: Final = (*_POSTS, 503, 504)
_KEY: Final = "key"
_STREAM_SCHEMA: Final = {
    "type": "string",
    "description": "Server-sent events: `data: ` and one chunk object a frame, at last `data: [DONE]`. "
    "A failure after the first frame is an `event: error` frame with the error object.",
}


@dataclass(frozen=True, slots=True)
class Route:
    """One path and method: what it takes, and every status it may answer with (401 goes without saying).

    ``answers`` maps a successful (or expected) status to content types and their schema types.
    """

    path: str
    method: str
    summary: str
    answers: dict[int, dict[str, Any]]
    errors: tuple[int, ...] = _READS
    body: type[msgspec.Struct] | None = None
    path_params: tuple[str, ...] = field(default=())


ROUTES: Final = (
    Route(
        "/v1/chat/completions",
        "post",
        "Answer a conversation",
        {200: {JSON: replies.ChatReply, SSE: None}},
        _GENERATES,
        ChatRequest,
    ),
    Route(
        "/v1/completions",
        "post",
        "Continue a text",
        {200: {JSON: replies.CompletionReply, SSE: None}},
        _GENERATES,
        CompletionRequest,
    ),
    Route("/v1/models", "get", "The models that are served", {200: {JSON: replies.ModelList}}),
    Route(
        "/v1/models/{model_id}",
        "get",
        "One model",
        {200: {JSON: replies.ModelCard}},
        path_params=("model_id",),
    ),
    Route("/tokenize", "post", "Text to token ids", {200: {JSON: replies.TokenizeReply}}, _POSTS, TokenizeRequest),
    Route(
        "/detokenize", "post", "Token ids to text", {200: {JSON: replies.DetokenizeReply}}, _POSTS, DetokenizeRequest
    ),
    Route("/tokenizer_info", "get", "Special tokens and chat template", {200: {JSON: replies.TokenizerInfo}}),
    Route("/health", "get", "Whether the HTTP server runs", {200: {JSON: replies.HealthReply}}),
    Route(
        "/ready",
        "get",
        "Whether a request could be served now",
        {200: {JSON: replies.ReadyReply}, 503: {JSON: replies.ReadyReply}},
    ),
    Route("/metrics", "get", "Prometheus metrics", {200: {METRICS: None}}),
    Route("/version", "get", "The server's version", {200: {JSON: replies.VersionReply}}),
    Route("/openapi.json", "get", "This document", {200: {JSON: None}}),
)


def openapi_document(version: str) -> bytes:
    """The document as JSON."""
    types: list[Any] = [replies.ErrorReply, replies.ChatChunk]
    for route in ROUTES:
        types.extend([] if route.body is None else [route.body])
        types.extend(kind for contents in route.answers.values() for kind in contents.values() if kind is not None)
    types = list(dict.fromkeys(types))
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, references, strict=True))
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, schemas)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Baton", "version": version},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
            },
            "security": [{_KEY: []}, {}],  # keys are asked for where the operator has made some
        }
    )


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    open_to_all = route.path in OPEN_PATHS
    responses: dict[str, Any] = {
        str(status): {"description": _ERRORS[status], "content": {JSON: {"schema": schemas[replies.ErrorReply]}}}
        for status in (route.errors if open_to_all else (401, *route.errors))
    }
    for status, contents in route.answers.items():
        responses[str(status)] = {
            "description": "OK" if status == 200 else _ERRORS[status],
            "content": {kind: {"schema": _schema(kind, of, schemas)} for kind, of in contents.items()},
        }
    operation: dict[str, Any] = {"summary": route.summary, "responses": dict(sorted(responses.items()))}
    if open_to_all:
        operation["security"] = []
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[route.body]}}}
    if route.path_params:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.path_params
        ]
    return operation


def _schema(kind: str, of: Any, schemas: dict[Any, Any]) -> Any:
    if of is not None:
        return schemas[of]
    if kind == SSE:
        return _STREAM_SCHEMA
    return {"type": "string"} if kind == METRICS else {"type": "object"}
