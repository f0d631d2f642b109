"""A router told to stop ends, whatever its tasks do with a cancellation."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest
from fastapi import FastAPI

from router import service


class Stubborn:
    """Follows the cluster, and its Redis client swallows the first cancellation."""

    def __init__(self) -> None:
        self.swallowed = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.swallowed += 1
                if self.swallowed > 1:
                    raise


async def stop_it(plant: Stubborn) -> None:
    app = FastAPI()
    with service.bind("127.0.0.1", 0) as sock:
        sock.listen()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/docs"
        running = asyncio.create_task(service._run(app, sock, plant))  # type: ignore[arg-type]
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await running


@pytest.mark.timeout(60)
def test_a_swallowed_cancellation_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "UNFOLLOW_S", 0.1)
    plant = Stubborn()
    asyncio.run(stop_it(plant))
    assert plant.swallowed == 2
