"""The demo model's tokenizer, and the front served by a real uvicorn over a fake generator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import hypothesis
import openai
import pytest
import pytest_asyncio
import uvicorn
from fake_generator import FakeGenerator
from front_harness import CONTEXT, MODEL, Front, WatchedMetrics

from cluster.model_store import DEMO_MODEL, demo_model_directory, read_config, resolve_model
from router.app import FrontSettings, create_app
from router.protocol import BoundedHttpProtocol
from router.tokenizer import Tokenizer

hypothesis.settings.register_profile("router", deadline=None)
hypothesis.settings.load_profile("router")


@pytest.fixture(scope="session")
def model_directory() -> Path:
    if not (demo_model_directory() / "tokenizer.json").is_file():
        subprocess.run([sys.executable, "-m", "engine.demo_model", DEMO_MODEL], check=True)
    return resolve_model(DEMO_MODEL).directory


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    facts = read_config(model_directory)
    return Tokenizer.from_directory(model_directory, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tokenizer: Tokenizer) -> AsyncIterator[Front]:
    generator, metrics = FakeGenerator(), WatchedMetrics()
    settings = FrontSettings(
        served_name=MODEL, max_model_len=CONTEXT, version="0.0", max_body_bytes=1 << 20, system_fingerprint="fp"
    )
    app = create_app(settings, tokenizer, generator, metrics)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # asyncio leaves Nagle's algorithm on for sockets without an explicit protocol: 40 ms a request.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off", http=BoundedHttpProtocol))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        ):
            yield Front(url, generator, tokenizer, metrics, http, client, app)
        server.should_exit = True
        await running


@pytest_asyncio.fixture(loop_scope="module")
async def front(served: Front) -> AsyncIterator[Front]:
    """The served front with a fresh script; at the end nothing may still run."""
    served.generator.reset()
    yield served
    assert served.generator.num_open == 0
    assert served.metrics.registry.get_sample_value("baton_router_requests_in_flight") == 0
