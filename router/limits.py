"""How much each key's holder may ask at once and a minute. Pure: the caller brings the time."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api_keys import ApiKey

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request must wait, and for how many seconds at least."""

    reason: str
    retry_after_s: float


@dataclass(slots=True)
class _Account:
    """``tokens`` refill by the minute's rate up to that rate; each request takes one."""

    tokens: float
    refilled_s: float
    num_running: int = 0


class KeyLimits:
    """Counts requests by key. :meth:`enter` and :meth:`leave` come in pairs; a refused request does not count."""

    def __init__(self, share: int = 1) -> None:
        """``share``: how many processes divide each limit between them (rounded up)."""
        self._share = share
        self._accounts: dict[str, _Account] = {}

    def enter(self, key: ApiKey, now: float) -> Refusal | None:
        """Let one request in, or say when to come back."""
        rate = self._part(key.requests_per_minute)
        account = self._accounts.setdefault(key.name, _Account(tokens=float(rate or 0), refilled_s=now))
        if (most := self._part(key.max_concurrent)) is not None and account.num_running >= most:
            return Refusal(f"This API key may have {key.max_concurrent} requests running.", 1.0)
        if rate is not None:
            gained = (now - account.refilled_s) * rate / _MINUTE_S
            account.tokens, account.refilled_s = min(float(rate), account.tokens + gained), now
            if account.tokens < 1.0:
                wait_s = (1.0 - account.tokens) * _MINUTE_S / rate
                return Refusal(f"This API key may send {key.requests_per_minute} requests a minute.", wait_s)
            account.tokens -= 1.0
        account.num_running += 1
        return None

    def leave(self, key: ApiKey) -> None:
        """One request that was let in has ended, however it did."""
        self._accounts[key.name].num_running -= 1

    def running(self) -> dict[str, int]:
        """Requests running now, by key name."""
        return {name: account.num_running for name, account in self._accounts.items()}

    def _part(self, limit: int | None) -> int | None:
        return None if limit is None else -(-limit // self._share)
