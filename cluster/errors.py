"""The one error tree: every way a request can fail, with its wire code and HTTP status.

Vendor exceptions (zmq, redis, ucxx, msgspec) are translated where the vendor library lives and never pass
that file. Messages are for the person who sent the request: they name the field or the limit, never prompt
text, file paths, addresses or object representations.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of all errors a request can end with.

    ``code`` crosses the wire and appears as ``error.code``; ``status`` is the HTTP status; ``kind`` is
    OpenAI's ``error.type``; ``retryable`` says whether the same request may succeed later.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(BatonError):
    """The request is malformed, mistyped, out of range or asks for something we do not support."""

    code = "invalid_value"
    status = 400
    kind = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt (plus requested tokens) exceed the model's positions or a node's whole KV pool."""

    code = "context_length_exceeded"


class AuthenticationError(BatonError):
    """No API key, or none of ours."""

    code = "invalid_api_key"
    status = 401
    kind = "invalid_request_error"


class NotFoundError(BatonError):
    """Unknown path."""

    code = "not_found"
    status = 404
    kind = "not_found_error"


class ModelNotFoundError(NotFoundError):
    """The request names a model this deployment does not serve."""

    code = "model_not_found"


class MethodNotAllowedError(BatonError):
    """Known path, wrong HTTP method."""

    code = "method_not_allowed"
    status = 405
    kind = "invalid_request_error"


class BodyTooLargeError(BatonError):
    """The body is over the configured limit."""

    code = "request_too_large"
    status = 413
    kind = "invalid_request_error"


class UnsupportedMediaTypeError(BatonError):
    """Anything but uncompressed ``application/json``."""

    code = "unsupported_media_type"
    status = 415
    kind = "invalid_request_error"


class OverloadedError(BatonError):
    """The queue is full, or no decode node had room before the queue's time limit."""

    code = "queue_full"
    status = 429
    kind = "rate_limit_error"
    retryable = True


class RateLimitError(BatonError):
    """The holder of an API key asks more often, or more at once, than it may."""

    code = "rate_limit_exceeded"
    status = 429
    kind = "rate_limit_error"
    retryable = True


class NoUsablePairError(BatonError):
    """No prefill node and decode node that may work together are alive."""

    code = "no_workers"
    status = 503
    kind = "server_error"
    retryable = True


class WorkerLostError(BatonError):
    """A node that held part of the request died or stopped answering."""

    code = "worker_lost"
    status = 503
    kind = "server_error"
    retryable = True


class TransferError(BatonError):
    """KV blocks did not arrive, or did not arrive intact."""

    code = "transfer_failed"
    status = 503
    kind = "server_error"
    retryable = True


class DeadlineError(BatonError):
    """The request's own deadline passed."""

    code = "timeout"
    status = 504
    kind = "server_error"
    retryable = True


class NodeStateError(BatonError):
    """A node was asked for something its state does not allow (stale epoch, unknown ticket, full pool)."""

    code = "node_state"
    status = 503
    kind = "server_error"
    retryable = True


class EngineError(BatonError):
    """A bug or numerical failure inside the engine, for this request only."""

    code = "engine_error"


def error_from_wire(code: str, message: str) -> BatonError:
    """Rebuild the error a node reported in ``Failed``; unknown codes become :class:`EngineError`."""
    return _BY_CODE.get(code, EngineError)(message)


def _all_errors(root: type[BatonError]) -> list[type[BatonError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_all_errors(child))
    return found


_BY_CODE: dict[str, type[BatonError]] = {kind.code: kind for kind in _all_errors(BatonError)}
