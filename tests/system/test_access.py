"""`baton up` with keys and two router workers: one port, two routers, an operator's port each."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.api_keys import digest_of, new_key
from tests.system.stack import Stack, running_stack, wait_for

KEY, OF_THE_ENVIRONMENT = new_key(), new_key()


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[[key]]\nname = "tests"\nsha256 = "{digest_of(KEY.encode()).hex()}"\nmax_concurrent = 8\n')
    options = ("--api-keys", str(keys), "--workers", "2", "--admin-port", "0")
    with running_stack(demo_model_dir, options=options, api_key=OF_THE_ENVIRONMENT) as running:
        yield running


def post(stack: Stack, key: str | None) -> httpx.Response:
    """One completion over a connection of its own, which either worker may take."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{stack.base_url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def admin_ports(log_dir: Path) -> list[int]:
    return [int(port) for port in re.findall(r"operator's port: http://127.0.0.1:(\d+)", log_of(log_dir))]


def log_of(log_dir: Path) -> str:
    return (log_dir / "router.log").read_text()


def test_the_key_opens_both_workers_and_nothing_else_does(stack: Stack) -> None:
    texts = set()
    for _ in range(12):
        assert post(stack, None).status_code == 401
        for key in (KEY, OF_THE_ENVIRONMENT):
            answer = post(stack, key)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1
    ports = admin_ports(stack.log_dir)
    assert len(ports) == 2
    views = [httpx.get(f"http://127.0.0.1:{port}/debug/router", trust_env=False).json() for port in ports]
    assert len({view["router"] for view in views}) == 2
    for view in views:
        assert {node["role"] for node in view["nodes"]} == {"prefill", "decode"}
        assert all(node["usable"] for node in view["nodes"])
        assert view["requests_by_key"].get("tests", 0) == 0
    texts_of_metrics = [httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text for port in ports]
    assert all("baton_router_requests_total" in text for text in texts_of_metrics)
    assert KEY not in log_of(stack.log_dir)


def test_a_worker_that_dies_is_started_again(stack: Stack) -> None:
    parent = psutil.Process(stack.pids["router"])
    victim = parent.children()[0]
    victim.send_signal(signal.SIGKILL)
    wait_for("a third operator's port", lambda: len(admin_ports(stack.log_dir)) >= 3, 60)
    wait_for("two workers", lambda: len(parent.children()) == 2)

    def both_serve() -> bool:
        return all(post(stack, KEY).status_code == 200 for _ in range(6))

    wait_for("both workers serve", both_serve, 60)
