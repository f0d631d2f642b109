"""The services of the compose file, up for the length of a block."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from testing.base_image import BaseImages
from testing.engine import Engine
from testing.shell import StepError, run, say, timed

PROJECT: Final = "baton-test"
ROUTER_IMAGE: Final = "baton-test-router"
NODE_IMAGE: Final = "baton-test-node"
MODEL: Final = "smollm2-135m"
NODES_OF_A_KIND: Final = 2

_FILE: Final = "compose/docker-compose.yml"
_BUILD_S: Final = 1500
_UP_S: Final = 240
_READY_S: Final = 180


@dataclass(frozen=True, slots=True)
class Stack:
    """Running services; ``settings`` are the environment of the compose file."""

    engine: Engine
    settings: dict[str, str]
    command: tuple[str, ...]

    @property
    def base_url(self) -> str:
        """Where the router answers on this machine."""
        return f"http://127.0.0.1:{self.settings['BATON_PORT']}"

    def compose(
        self, *arguments: str, timeout_s: float, check: bool = True, without: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``docker compose ...`` for this project; ``without`` blanks one setting."""
        env = {**self.engine.env, **self.settings}
        if without:
            env[without] = ""
        return run([*self.command, *arguments], timeout_s=timeout_s, env=env, check=check)

    def docker(self, *arguments: str, timeout_s: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``docker ...`` on the engine in use."""
        return run(["docker", *arguments], timeout_s=timeout_s, env=self.engine.env, check=check)

    def containers(self, service: str | None = None) -> list[dict[str, Any]]:
        """What the engine knows of our containers, running or not."""
        names = [service] if service else []
        ids = self.compose("ps", "-a", "-q", *names, timeout_s=60).stdout.split()
        return list(json.loads(self.docker("inspect", *ids).stdout)) if ids else []

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One HTTP request to the router. Raises ``httpx.HTTPError``."""
        return httpx.request(method, self.base_url + path, timeout=90, trust_env=False, **options)

    def print_logs(self) -> None:
        """State and last lines of every container, for whoever reads a failed run."""
        say(self.compose("ps", "-a", timeout_s=60, check=False).stdout)
        say(self.compose("logs", "--no-color", "--tail=80", timeout_s=60, check=False).stdout)


@contextmanager
def stack(engine: Engine, images: BaseImages) -> Iterator[Stack]:
    """Build both images, start the services, and take everything down afterwards."""
    with tempfile.NamedTemporaryFile(prefix="baton-compose-", suffix=".env") as no_env_file:
        settings = {
            "BATON_SECRET": secrets.token_hex(32),
            "REDIS_PASSWORD": secrets.token_hex(24),
            "BATON_MODEL_DIR": str(_model_directory()),
            "BATON_MODEL_NAME": MODEL,
            "BATON_PORT": str(_free_port()),
            "BATON_ROUTER_IMAGE": ROUTER_IMAGE,
            "BATON_NODE_IMAGE": NODE_IMAGE,
            **images.settings,
        }
        # A user's compose/.env must not decide what we test.
        options = ("--env-file", no_env_file.name, "-p", PROJECT, "-f", _FILE)
        services = Stack(engine=engine, settings=settings, command=(*engine.compose, *options))
        services.compose("down", "-v", "--remove-orphans", timeout_s=120)
        with timed("build images"):
            services.compose("build", timeout_s=_BUILD_S)
        try:
            yield services
        finally:
            with timed("compose down"):
                services.compose("down", "-v", "--remove-orphans", timeout_s=120)


def start(services: Stack) -> None:
    """Bring up two nodes of each kind and wait until the router has a pair it can use."""
    with timed("compose up"):
        scale = [f"--scale={kind}={NODES_OF_A_KIND}" for kind in ("prefill", "decode")]
        services.compose("up", "-d", "--no-build", *scale, timeout_s=_UP_S)
    with timed("router ready"):
        _wait_ready(services, deadline=time.monotonic() + _READY_S)


def _wait_ready(services: Stack, deadline: float) -> None:
    last = "no answer"
    while time.monotonic() < deadline:
        try:
            answer = services.request("GET", "/ready")
            if answer.status_code == 200:
                return
            last = f"{answer.status_code} {answer.text[:500]}"
        except httpx.HTTPError as error:
            last = str(error) or type(error).__name__
        ended = [one["Name"] for one in services.containers() if one["RestartCount"] or not one["State"]["Running"]]
        if ended:
            raise StepError(f"ended by themselves: {', '.join(ended)}")
        time.sleep(0.5)
    raise StepError(f"the router was not ready after {_READY_S} s: {last}")


def _model_directory() -> Path:
    if given := os.environ.get("BATON_MODEL_DIR"):
        return Path(given).resolve()
    with timed("model"):
        run([sys.executable, "-m", "engine.demo_model", MODEL], timeout_s=900)
    where = "from cluster.model_store import demo_model_directory; print(demo_model_directory())"
    return Path(run([sys.executable, "-c", where], timeout_s=60).stdout.strip()).resolve()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
