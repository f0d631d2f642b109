"""Keys, limits, cache salts and CORS on a served front."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fake_generator import FakeGenerator, deltas
from fastapi import FastAPI
from fastapi.routing import APIRoute

from cluster.api_keys import ApiKey, KeyRing, digest_of
from router.app import FrontSettings, create_app
from router.limits import KeyLimits
from router.metrics import Metrics
from router.protocol import BoundedHttpProtocol
from router.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {name: f"sk-test-{name}-0123456789" for name in ("alice", "bob", "narrow", "slow")}
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 1}


def holder(name: str, **limits: int) -> ApiKey:
    return ApiKey(name, digest_of(KEYS[name].encode()), cache_salt=name, **limits)  # type: ignore[arg-type]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


@dataclass(frozen=True, slots=True)
class Guarded:
    app: FastAPI
    generator: FakeGenerator
    limits: KeyLimits
    http: httpx.AsyncClient


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@contextlib.asynccontextmanager
async def serving(tokenizer: Tokenizer, keys: KeyRing, *origins: str) -> AsyncIterator[Guarded]:
    generator, limits = FakeGenerator(), KeyLimits()
    generator.script = deltas((5,))
    settings = FrontSettings(served_name="m", max_model_len=64, version="0", cors_origins=origins)
    app = create_app(settings, tokenizer, generator, Metrics(), keys=keys, limits=limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = _Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off", http=BoundedHttpProtocol))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30) as http:
            yield Guarded(app, generator, limits, http)
        server.should_exit = True
        await running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tokenizer: Tokenizer) -> AsyncIterator[Guarded]:
    holders = [holder("alice"), holder("bob"), holder("narrow", max_concurrent=1)]
    holders += [holder("slow", requests_per_minute=2)]
    async with serving(tokenizer, KeyRing(holders), "https://chat.example") as front:
        yield front


@pytest.mark.parametrize(
    "given",
    [
        [],
        [b"Bearer"],
        [b"Bearer sk-test-nobody-0123456789"],
        [b"Basic " + KEYS["alice"].encode()],
        [KEYS["alice"].encode()],
        [b"Bearer sk-test-\xfc\xff-0123456789"],
        [b"Bearer " + b"k" * 4000],
        [b"Bearer " + KEYS["alice"].encode(), b"Bearer " + KEYS["bob"].encode()],
    ],
)
async def test_t13_without_a_key_of_ours_there_is_nothing(guarded: Guarded, given: list[bytes]) -> None:
    headers = [(b"authorization", value) for value in given]
    answer = await guarded.http.post(COMPLETIONS, json=BODY, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in answer.headers
    assert (await guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("alice"))).status_code == 200


async def test_p5_every_path_but_health_asks_for_a_key(guarded: Guarded) -> None:
    paths = {route.path for route in guarded.app.routes if isinstance(route, APIRoute)}
    paths |= {"/", "/docs", "/openapi.json", "/debug/kv", "/nothing", "/health/", "//health", "/v1/models/x"}
    for path in sorted(paths):
        for method in ("GET", "POST", "HEAD", "DELETE"):
            status = (await guarded.http.request(method, path)).status_code
            is_health = path.rstrip("/") == "/health" and not path.startswith("//")
            assert (status == 401) != is_health, f"{method} {path}: {status}"
    assert (await guarded.http.get("/health")).status_code == 200


async def test_it_is_the_path_that_counts_not_the_host(guarded: Guarded) -> None:
    for host in ("x/health?", "x/health#", "127.0.0.1/health"):
        answer = await guarded.http.post(COMPLETIONS, json=BODY, headers={"host": host})
        assert answer.status_code in (400, 401)
    assert (await guarded.http.post(f"{COMPLETIONS}?/health", json=BODY)).status_code == 401


async def test_the_body_of_a_stranger_is_not_read(guarded: Guarded) -> None:
    answer = await guarded.http.post(COMPLETIONS, content=b"{" * 100, headers={"content-type": "text/plain"})
    assert answer.status_code == 401


async def test_the_scheme_s_case_and_spaces_do_not_matter(guarded: Guarded) -> None:
    for value in (f"bearer {KEYS['alice']}", f"BEARER   {KEYS['alice']}"):
        answer = await guarded.http.get("/v1/models", headers={"authorization": value})
        assert answer.status_code == 200


async def test_holders_of_keys_do_not_share_prefix_caches(guarded: Guarded) -> None:
    salts = []
    for name, own in (("alice", None), ("bob", None), ("alice", "x"), ("alice", None)):
        guarded.generator.seen.clear()
        body = BODY if own is None else BODY | {"cache_salt": own}
        assert (await guarded.http.post(COMPLETIONS, json=body, headers=bearer(name))).status_code == 200
        salts.append(guarded.generator.seen[-1].cache_salt)
    assert len(set(salts)) == 3
    assert salts[0] == salts[3]
    assert all(salts)


async def test_one_request_over_the_concurrent_limit_is_told_when_to_come_back(guarded: Guarded) -> None:
    hold = asyncio.Event()
    guarded.generator.reset()
    guarded.generator.script = [hold, *deltas((5,))]
    first = asyncio.create_task(guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("narrow")))
    await guarded.generator.opened.wait()
    second = await guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("narrow"))
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(second.headers["retry-after"]) >= 1
    assert (await guarded.http.get("/v1/models", headers=bearer("narrow"))).status_code == 200
    hold.set()
    assert (await first).status_code == 200
    assert (await guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("narrow"))).status_code == 200


async def test_a_client_that_leaves_gives_its_place_back(guarded: Guarded) -> None:
    guarded.generator.reset()
    guarded.generator.script = [asyncio.Event()]
    leaving = asyncio.create_task(guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("narrow")))
    await guarded.generator.opened.wait()
    assert guarded.limits.running()["narrow"] == 1
    leaving.cancel()
    async with asyncio.timeout(30):
        while guarded.limits.running()["narrow"]:  # noqa: ASYNC110 - a count, without an event to wait for
            await asyncio.sleep(0.01)
    guarded.generator.script = deltas((5,))
    assert (await guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("narrow"))).status_code == 200


async def test_the_rate_limit_refuses_the_third_of_two(guarded: Guarded) -> None:
    guarded.generator.script = deltas((5,))
    answers = [await guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("slow")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert (await guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("alice"))).status_code == 200


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


async def test_p18_only_named_sites_may_call_from_a_browser(guarded: Guarded) -> None:
    ours = {"origin": "https://chat.example"}
    answer = await guarded.http.options(COMPLETIONS, headers=PREFLIGHT | ours)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    evil = {"origin": "https://evil.example"}
    answer = await guarded.http.options(COMPLETIONS, headers=PREFLIGHT | evil)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers
    answer = await guarded.http.post(COMPLETIONS, json=BODY, headers=bearer("alice") | evil)
    assert "access-control-allow-origin" not in answer.headers


async def test_p18_no_site_may_by_default(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, KeyRing(())) as front:
        answer = await front.http.options(COMPLETIONS, headers=PREFLIGHT | {"origin": "https://evil.example"})
        assert answer.status_code == 204
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_without_keys_an_empty_one_is_fine(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, KeyRing(())) as front:
        for value in ("Bearer", "Bearer whatever", ""):
            answer = await front.http.post(COMPLETIONS, json=BODY, headers={"authorization": value})
            assert answer.status_code == 200
        assert front.generator.seen[-1].cache_salt == ""
