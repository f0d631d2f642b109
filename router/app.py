"""The router's HTTP front: OpenAI's routes, and those that operators and load balancers ask.

Nothing below knows nodes, queues or placement: a request becomes a :class:`~router.planning.Plan`, the plan
an :class:`~router.answer.Answer` that reads from the :class:`~router.generation.Generator`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api_keys import KeyRing
from cluster.errors import BatonError, EngineError, InvalidRequestError, MethodNotAllowedError, NotFoundError
from router.access import AccessMiddleware, tenant_salt
from router.answer import Answer
from router.body import read_body
from router.generation import Generator
from router.limits import KeyLimits
from router.metrics import METRICS_CONTENT_TYPE, Metrics
from router.middleware import RECORD_KEY, FrontMiddleware, RequestRecord, endpoint_of, error_response
from router.openapi import openapi_document
from router.planning import Plan, Planner, for_tenant
from router.replies import HealthReply, ModelCard, ModelList, ReadyReply, VersionReply
from router.schemas import decode_chat, decode_completion
from router.tokenizer import Tokenizer
from router.tokenizing import decode_detokenize, decode_tokenize, detokenize, tokenize, tokenizer_info
from router.tool_formats import ToolFormat
from router.unknown_fields import UnknownFields

_READY_RETRY_S: Final = "1"
_Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """What the HTTP front can be told.

    ``max_model_len`` counts prompt plus output. ``body_timeout_s`` limits the arrival of a whole request body,
    ``send_timeout_s`` the time a client may leave one frame of a stream unread once the socket is full.
    ``system_fingerprint`` should change with the weights and the engine's version. Pages of ``cors_origins`` may read
    answers in a browser; none by default. Without a ``tool_format`` it is that of the chat template.
    """

    served_name: str
    max_model_len: int
    version: str
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    system_fingerprint: str | None = None
    cors_origins: tuple[str, ...] = ()
    tool_format: ToolFormat | None = None


class _Front:
    """The route handlers, and what they share."""

    def __init__(self, settings: FrontSettings, tokenizer: Tokenizer, generator: Generator, metrics: Metrics) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._generator = generator
        self._metrics = metrics
        written = settings.tool_format or tokenizer.tool_format()
        self._planner = Planner(settings.served_name, settings.max_model_len, tokenizer, generator, written)
        self._created = int(time.time())
        self._was_ready = False
        self._unknown = UnknownFields()
        self._openapi = openapi_document(settings.version)

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        return self._answer(request, await self._planner.completion(decode_completion(body, self._unknown)))

    async def chat_completions(self, request: Request) -> Response:
        body = await self._body(request)
        return self._answer(request, await self._planner.chat(decode_chat(body, self._unknown)))

    async def tokenize(self, request: Request) -> Response:
        wanted = decode_tokenize(await self._body(request), self._unknown)
        self._planner.check_model(wanted.model)
        return _json(await tokenize(wanted, self._tokenizer, self._settings.max_model_len))

    async def detokenize(self, request: Request) -> Response:
        wanted = decode_detokenize(await self._body(request), self._unknown)
        self._planner.check_model(wanted.model)
        return _json(await detokenize(wanted, self._tokenizer, self._settings.max_model_len))

    async def tokenizer_info(self) -> Response:
        return _json(tokenizer_info(self._tokenizer, self._settings.max_model_len))

    async def models(self) -> Response:
        # Some take a listed model for a promise that it answers: nothing is listed before nodes were ready once.
        self._was_ready = self._was_ready or self._generator.ready().ready
        return _json(ModelList([self._model_card()] if self._was_ready else []))

    async def model(self, request: Request) -> Response:
        self._planner.check_model(request.path_params["model_id"])
        return _json(self._model_card())

    async def health(self) -> Response:
        return _json(HealthReply())

    async def ready(self) -> Response:
        readiness = self._generator.ready()
        if readiness.ready:
            return _json(ReadyReply(True))
        return _json(ReadyReply(False, readiness.reason), status=503, headers={"retry-after": _READY_RETRY_S})

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), headers={"content-type": METRICS_CONTENT_TYPE})

    async def version(self) -> Response:
        return _json(VersionReply(self._settings.version))

    async def openapi(self) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def _body(self, request: Request) -> bytes:
        settings = self._settings
        return await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)

    def _answer(self, request: Request, plan: Plan) -> Answer:
        return Answer(
            for_tenant(plan, tenant_salt(request.scope)),
            model=self._settings.served_name,
            system_fingerprint=self._settings.system_fingerprint,
            tokenizer=self._tokenizer,
            generator=self._generator,
            metrics=self._metrics,
            send_timeout_s=self._settings.send_timeout_s,
        )

    def _model_card(self) -> ModelCard:
        name = self._settings.served_name
        return ModelCard(id=name, created=self._created, root=name, max_model_len=self._settings.max_model_len)


class _Generating:
    """Hands requests to their handlers, as the framework's routes do."""

    def __init__(self, handlers: Mapping[str, _Handler]) -> None:
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._handlers[scope["path"]](request)
        except BatonError as error:
            response = await _on_baton_error(request, error)
        except ClientDisconnect as error:
            response = await _on_client_disconnect(request, error)
        await response(scope, receive, send)


class _App(FastAPI):
    """Requests that generate go to their handlers by a way of their own, through the same layers of ours: the
    framework's would take as long as all the rest.
    """

    def __init__(self, layers: Sequence[Middleware], handlers: Mapping[str, _Handler]) -> None:
        super().__init__(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, middleware=layers)
        self._generating: ASGIApp = _Generating(handlers)
        for layer in reversed(layers):
            self._generating = layer.cls(self._generating, *layer.args, **layer.kwargs)
        for path, handler in handlers.items():
            self.add_api_route(path, handler, methods=["POST"])  # for what the framework says of other methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["method"] == "POST" and endpoint_of(scope["path"]) != "other"
        await (self._generating if generates else super().__call__)(scope, receive, send)


def create_app(
    settings: FrontSettings,
    tokenizer: Tokenizer,
    generator: Generator,
    metrics: Metrics,
    *,
    keys: KeyRing | None = None,
    limits: KeyLimits | None = None,
) -> FastAPI:
    """Build the application; nothing runs until it is served. Without ``keys`` everybody may ask."""
    layers = [Middleware(FrontMiddleware, metrics=metrics)]  # the first to see a request
    if settings.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",),  # openai's clients send a dozen of x-stainless-*; cookies are never allowed
                expose_headers=("x-request-id", "retry-after"),
            )
        )
    layers.append(Middleware(AccessMiddleware, keys=keys or KeyRing(()), limits=limits or KeyLimits()))
    front = _Front(settings, tokenizer, generator, metrics)
    app = _App(layers, {"/v1/completions": front.completions, "/v1/chat/completions": front.chat_completions})
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_api_route("/tokenize", front.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", front.detokenize, methods=["POST"])
    readable = ["GET", "HEAD"]
    app.add_api_route("/tokenizer_info", front.tokenizer_info, methods=readable)
    app.add_api_route("/openapi.json", front.openapi, methods=readable)
    app.add_api_route("/v1/models", front.models, methods=readable)
    app.add_api_route("/v1/models/{model_id:path}", front.model, methods=readable)
    app.add_api_route("/health", front.health, methods=readable)
    app.add_api_route("/ready", front.ready, methods=readable)
    app.add_api_route("/metrics", front.metrics, methods=readable)
    app.add_api_route("/version", front.version, methods=readable)
    return app


def _json(content: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json", headers=headers)


async def _on_baton_error(_: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, BatonError) else EngineError("Internal error."))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Translate what the framework itself refuses: unknown paths and wrong methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return error_response(NotFoundError("Unknown path."))
    if status == 405:
        allowed = (error.headers or {}).get("Allow") if isinstance(error, HTTPException) else None
        if request.method == "OPTIONS" and allowed is not None:
            # Not of an origin that we let in: a preflight finds nothing here that lets it go on.
            return Response(status_code=204, headers={"allow": f"{allowed}, OPTIONS"})
        response = error_response(MethodNotAllowedError("This path does not take that method."))
        if allowed is not None:
            response.headers["allow"] = allowed
        return response
    return error_response(InvalidRequestError("Bad request.") if status < 500 else EngineError("Internal error."))


async def _on_client_disconnect(request: Request, _: Exception) -> Response:
    """Nobody reads this; it ends the request with the status that logs know for it."""
    record: RequestRecord = request.scope[RECORD_KEY]
    record.outcome = "cancelled"
    return Response(status_code=499)
