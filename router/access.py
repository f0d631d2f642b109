"""Nobody gets past here without a key, where there are keys: every path but /health is refused by default."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api_keys import ApiKey, KeyRing
from cluster.errors import AuthenticationError, RateLimitError
from router.limits import KeyLimits
from router.middleware import error_response

TENANT_KEY: Final = "baton.tenant"
# Those that answer without a key.
OPEN_PATHS: Final = frozenset({"/health"})
_SCHEME: Final = b"bearer"


class AccessMiddleware:
    """Checks ``Authorization: Bearer KEY`` before a body is read or a route is looked up.

    It goes by the path that is served, never by a URL put together from headers (CVE-2026-48746). Limits hold for
    POST: asking what there is costs nothing. The key's holder is left in the scope under :data:`TENANT_KEY`.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, limits: KeyLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        holder = self._holder(scope)
        if holder is None:
            text = "Missing or wrong API key: send it as `Authorization: Bearer KEY`."
            await error_response(AuthenticationError(text))(scope, receive, send)
            return
        scope = {**scope, TENANT_KEY: holder}
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if refusal := self._limits.enter(holder, self._clock()):
            error = RateLimitError(refusal.reason, retry_after_s=refusal.retry_after_s)
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._limits.leave(holder)

    def _holder(self, scope: Scope) -> ApiKey | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return None
        scheme, _, key = given[0].partition(b" ")
        key = key.strip(b" ")
        return self._keys.find(key) if scheme.lower() == _SCHEME and key else None


def tenant_salt(scope: Scope) -> str | None:
    """The cache salt of the key's holder; None where there are no keys."""
    holder: ApiKey | None = scope.get(TENANT_KEY)
    return None if holder is None else holder.cache_salt
