"""The router as a process: what it refuses to start with, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cluster.config import log_level
from router.__main__ import main
from tests.cluster.redis_server import wait_until

NO_REDIS = "redis://:hunter2@127.0.0.1:1/0"


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_REDIS")}
    return {**kept, **more}


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ((), {}, "no Redis"),
        (("--redis", NO_REDIS), {}, "no-such-model"),
        (("--redis", NO_REDIS, "--port", "99999"), {}, "--port"),
        (("--redis", NO_REDIS, "--max-waiting", "0"), {}, "--max-waiting"),
        (("--redis", NO_REDIS, "--max-wait-s", "nan"), {}, "--max-wait-s"),
        (("--redis", NO_REDIS, "--max-model-len", "0"), {}, "--max-model-len"),
        (("--redis", NO_REDIS, "--bind", "0.0.0.0"), {"BATON_SECRET": ""}, "BATON_SECRET"),
        (("--redis", NO_REDIS), {"BATON_SECRET": "short"}, "BATON_SECRET"),
        (("--redis", NO_REDIS), {"BATON_LOG_LEVEL": "loud"}, "BATON_LOG_LEVEL"),
        (("--redis", NO_REDIS, "--node-id", "a b"), {}, "--node-id"),
    ],
)
def test_settings_that_cannot_work(
    options: tuple[str, ...],
    variables: dict[str, str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("BATON_REDIS_URL", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("router.__main__.setup_logging", lambda _process: log_level())  # pytest's handlers stay
    monkeypatch.setattr(sys, "argv", ["router", "--model", "no-such-model", *options])
    assert main() == 2
    said = capsys.readouterr().err
    assert words in said
    assert "hunter2" not in said


def test_a_refusal_is_one_line_and_no_traceback() -> None:
    command = [sys.executable, "-m", "router", "--model", "no-such-model", "--redis", NO_REDIS, "--port", "-1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "router: --port must be between 0 and 65535\n"


@contextmanager
def running_router(model: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    options = ["--model", str(model), "--redis", NO_REDIS, "--port", "0"]
    with log.open("wb") as file:
        router = subprocess.Popen([sys.executable, "-m", "router", *options], env=environment(), stderr=file)
    try:
        wait_until(lambda: b"listening" in log.read_bytes() or router.poll() is not None)
        found = re.search(r"listening on (http://\S+)", log.read_text())
        assert found, log.read_text()
        yield router, found[1]
    finally:
        router.kill()
        router.wait()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_without_redis_and_ends_cleanly(demo_model_dir: Path, tmp_path: Path, signum: signal.Signals) -> None:
    log = tmp_path / "log"
    with running_router(demo_model_dir, log) as (router, url), httpx.Client(base_url=url, trust_env=False) as client:
        wait_until(lambda: client.get("/health").status_code == 200)
        ready = client.get("/ready")
        assert ready.status_code == 503
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert "node is alive" in refused.json()["error"]["message"]
        router.send_signal(signum)
        assert router.wait(60) == 0
    text = log.read_text()
    assert "Traceback" not in text
    assert "hunter2" not in text
    assert text.count("cannot read from Redis") == 1, "said once, not twice a second"
