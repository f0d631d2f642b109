"""Around every request: its record, its id in the answer, its count, and an answer even to our own bugs."""

from __future__ import annotations

import logging
import math
import re
import time
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import BatonError, EngineError
from router.completion import error_json
from router.ids import new_id
from router.metrics import Endpoint, Metrics, Outcome, outcome_of_status

logger = logging.getLogger(__name__)

RECORD_KEY: Final = "baton.request"
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_ENDPOINTS: Final[dict[str, Endpoint]] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}


@dataclass(slots=True)
class RequestRecord:
    """What the parts of the front note about one HTTP request.

    ``client_id`` is for the answer's header and the log only. ``outcome`` stays None where the status says it.
    """

    client_id: str
    endpoint: Endpoint
    started_s: float
    outcome: Outcome | None = None
    status: int | None = None


def error_response(error: BatonError) -> Response:
    """A failed request's answer, with the headers that tell clients whether to come back."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    elif error.status >= 500 and not error.retryable:
        headers["x-should-retry"] = "false"
    return Response(error_json(error), status_code=error.status, media_type="application/json", headers=headers)


def served_path(path: str) -> str:
    """One trailing slash more or less means the same; clients that do not follow redirects add it."""
    return path.removesuffix("/") or "/"


def endpoint_of(path: str) -> Endpoint:
    """What a POST to ``path`` asks for."""
    return _ENDPOINTS.get(served_path(path), "other")


class FrontMiddleware:
    """The outermost layer of ours."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = served_path(scope["path"])
        record = RequestRecord(
            client_id=_client_id(Headers(scope=scope)),
            endpoint=_ENDPOINTS.get(path, "other") if scope["method"] == "POST" else "other",
            started_s=time.perf_counter(),
        )
        scope = {**scope, "path": path, RECORD_KEY: record}
        if record.endpoint == "other":
            await self._answer(scope, receive, send, record)
        else:
            with self._metrics.in_flight.track_inprogress():
                await self._answer(scope, receive, send, record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.client_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed by a bug in the HTTP front", record.client_id)
            record.outcome = "error"
            if record.status is not None:
                raise  # part of an answer is out: only a broken connection can tell the client
            await error_response(EngineError("Internal error."))(scope, receive, send_with_id)
        finally:
            self._count(record)

    def _count(self, record: RequestRecord) -> None:
        outcome = record.outcome
        if outcome is None:
            outcome = "cancelled" if record.status is None else outcome_of_status(record.status)
        self._metrics.ended(record.endpoint, outcome)
        elapsed_s = time.perf_counter() - record.started_s
        if record.endpoint != "other":
            self._metrics.duration.observe(elapsed_s)
            logger.info(
                "request %s to %s ended: %s, status %s, %.3f s",
                record.client_id,
                record.endpoint,
                outcome,
                record.status,
                elapsed_s,
            )


def _client_id(headers: Headers) -> str:
    offered = headers.get("x-request-id", "")
    return offered if _CLIENT_ID.fullmatch(offered) else f"req-{new_id()}"
