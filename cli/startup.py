"""Waiting until a deployment serves, and showing how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.config import ConfigError
from cluster.membership import Membership, MembershipError

POLL_S = 0.1
FIRST_REQUEST_TIMEOUT_S = 60.0
# Redis answers in milliseconds or is not there: nothing else has been started yet, so say so soon.
REDIS_TIMEOUT_S = 10.0


class Startup:
    """Steps from nothing to a served request; use as ``with``. A bar on a terminal, one line a step elsewhere.

    ``check_alive`` raises :class:`ConfigError` if a process has ended; every wait gives up after ``timeout_s``
    seconds from the start, with a message that names what is missing.
    """

    def __init__(self, console: Console, num_steps: int, timeout_s: float, check_alive: Callable[[], None]) -> None:
        self._console = console
        self._timeout_s = timeout_s
        self._check_alive = check_alive
        self._began = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        hidden = not console.is_terminal
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden)
        self._task = self._progress.add_task("starting Redis", total=num_steps)

    def __enter__(self) -> Startup:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    async def wait_for_redis(self, url: str) -> None:
        """Until Redis answers."""
        membership = Membership(url)

        async def answers() -> bool:
            with suppress(MembershipError):
                await membership.read()
                return True
            return False

        try:
            await self._until(
                answers, "Redis cannot be reached; check --redis and its password", limit_s=REDIS_TIMEOUT_S
            )
        finally:
            await membership.close()
        self._done("redis is up", "loading the model")

    async def wait_for_nodes(self, url: str, node_ids: set[str]) -> None:
        """Until every node has registered."""
        membership = Membership(url)
        missing = set(node_ids)

        async def all_registered() -> bool:
            with suppress(MembershipError):
                for node_id in sorted(missing & (await membership.read()).keys()):
                    missing.discard(node_id)
                    self._done(f"{node_id} is up", f"waiting for {', '.join(sorted(missing)) or 'the router'}")
            return not missing

        try:
            await self._until(all_registered, "not all nodes have registered")
        finally:
            await membership.close()

    async def wait_for_request(self, base_url: str, model: str, api_key: str | None) -> None:
        """Until one request has gone through both pools."""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=10, trust_env=False) as client:

            async def ready() -> bool:
                with suppress(httpx.HTTPError):
                    return (await client.get("/ready")).status_code == 200
                return False

            await self._until(ready, "the router sees no usable pair of nodes")
            self._done("the router is up", "serving a first request")
            # Two tokens: the first comes from the prefill node, the second needs the KV blocks on the decode node.
            body = {"model": model, "prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
            status: list[str] = ["no answer"]

            async def served() -> bool:
                with suppress(httpx.HTTPError):
                    answer = await client.post("/v1/completions", json=body, timeout=FIRST_REQUEST_TIMEOUT_S)
                    status[0] = f"status {answer.status_code}"
                    return answer.status_code == 200
                return False

            await self._until(served, "the first request failed", status)
        self._done("a first request was served", "ready")

    async def _until(
        self,
        done: Callable[[], Awaitable[bool]],
        otherwise: str,
        details: list[str] | None = None,
        limit_s: float = float("inf"),
    ) -> None:
        limit_s = min(limit_s, self._timeout_s)
        while not await done():
            self._check_alive()
            if self.elapsed_s > limit_s:
                detail = f" ({details[-1]})" if details else ""
                raise ConfigError(f"{otherwise}{detail} after {limit_s:g} s")
            await asyncio.sleep(POLL_S)

    def _done(self, what: str, doing: str) -> None:
        self._progress.update(self._task, advance=1, description=doing)
        if self._progress.disable:
            self._console.print(f"{self.elapsed_s:6.1f} s  {what}", highlight=False)
