"""Reading a request body: everything that can be refused before its meaning is looked at.

The body comes back as UTF-8 bytes whose first character is ``{`` and whose nesting is shallow, so that the
JSON decoder behind it only ever sees input of bounded size and depth.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from starlette.requests import ClientDisconnect, Request

from cluster.errors import BodyTooLargeError, InvalidRequestError, UnsupportedMediaTypeError

MAX_JSON_DEPTH: Final = 64
MAX_JSON_PARTS: Final = 1 << 18

# Over this, checking takes milliseconds: a thread does it, in Python steps that let the event loop run.
_INLINE_BYTES: Final = 64 << 10
# A string, or a run of brackets. Possessive and with an optional end, so that an unterminated string costs one
# pass, not one per quote.
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]++|[\]}]++', re.DOTALL)


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The request's body, at most ``max_bytes`` of it, arrived within ``timeout_s`` seconds.

    Raises :class:`UnsupportedMediaTypeError` for anything but plain ``application/json``,
    :class:`BodyTooLargeError` (before reading, where the length is declared), :class:`InvalidRequestError` for
    bytes that cannot be a JSON object, and starlette's ``ClientDisconnect``.
    """
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _collect(request, max_bytes)
    except TimeoutError:
        raise InvalidRequestError("The request body did not arrive in time.") from None
    if len(body) > _INLINE_BYTES:
        await asyncio.to_thread(check_text, body)
    else:
        check_text(body)
    return body


def _check_headers(request: Request, max_bytes: int) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaTypeError("The Content-Type must be application/json.")
    name, _, charset = parameters.strip().lower().partition("=")
    if name == "charset" and charset.strip(' "') not in ("utf-8", "utf8"):
        raise UnsupportedMediaTypeError("The charset must be utf-8.")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaTypeError("A compressed request body is not supported: send it without Content-Encoding.")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)


async def _collect(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body is larger than {max_bytes} bytes.")


def check_text(body: bytes) -> None:
    """Raise :class:`InvalidRequestError` unless ``body`` is UTF-8, looks like an object and is shallow."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequestError("The request body is not valid UTF-8.") from None
    if not body.lstrip(b" \t\r\n").startswith(b"{"):
        raise InvalidRequestError("The request body must be a JSON object.")
    if not is_bounded(body):
        raise InvalidRequestError(
            f"The request body is nested deeper than {MAX_JSON_DEPTH} levels or has over {MAX_JSON_PARTS} parts."
        )


def is_bounded(body: bytes) -> bool:
    """True if brackets outside strings never nest deeper than :data:`MAX_JSON_DEPTH`, well-formed or not.

    Strings and runs of brackets are counted too, up to :data:`MAX_JSON_PARTS`: far more than any conversation
    that fits a model, far less than what 8 MiB of ``[],[],`` would cost to look through.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return True
    depth = 0
    for count, part in enumerate(_STRUCTURE.finditer(body)):
        if count >= MAX_JSON_PARTS:
            return False
        first = body[part.start()]
        if first in b"[{":
            depth += part.end() - part.start()
            if depth > MAX_JSON_DEPTH:
                return False
        elif first in b"]}":
            depth -= part.end() - part.start()
    return True
