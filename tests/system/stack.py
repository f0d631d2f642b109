"""A real deployment for tests: `baton up` as a user starts it, and eyes on what it holds."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import ENV_API_KEY, ENV_REDIS_URL, ENV_SECRET
from cluster.membership import Membership, NodeRecord

ROOT = Path(__file__).parent.parent.parent
START_S = 240.0
SETTLE_S = 15.0
T = TypeVar("T")
Metrics = dict[str, float]


def wait_for(what: str, probe: Callable[[], T | None], limit_s: float = SETTLE_S) -> T:
    """Poll until ``probe`` returns something true. Fails the test after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)


@dataclass
class Stack:
    """A running deployment. ``secret`` and ``redis_url`` allow more nodes to join by hand."""

    base_url: str
    redis_url: str
    secret: str
    log_dir: Path
    pids: dict[str, int]
    launcher: subprocess.Popen[bytes]
    extra: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def client(self, timeout: float = 120) -> httpx.Client:
        """A client of the router; close it before sockets are counted."""
        return httpx.Client(base_url=self.base_url, headers=self.headers, timeout=timeout, trust_env=False)

    def complete(self, prompt: list[int] | str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """One greedy completion; the answer's JSON."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **more}
        with self.client() as client:
            response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def records(self) -> dict[str, NodeRecord]:
        """What the nodes say of themselves in Redis."""

        async def read() -> dict[str, NodeRecord]:
            membership = Membership(self.redis_url)
            try:
                return await membership.read()
            finally:
                await membership.close()

        return asyncio.run(read())

    def metrics(self, url: str) -> Metrics:
        """All samples of a process by name (and labels, if any)."""
        text = httpx.get(f"{url}/metrics", headers=self.headers, timeout=10, trust_env=False).raise_for_status().text
        found: Metrics = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def node_metrics(self, role: str) -> list[Metrics]:
        """Metrics of every registered node of that role, by node id."""
        return [self.metrics(r.http_address) for _id, r in sorted(self.records().items()) if r.role == role]

    def total(self, role: str, name: str) -> float:
        """The sum of one sample over all nodes of that role."""
        return sum(metrics[name] for metrics in self.node_metrics(role))

    def alive_nodes(self, role: str) -> int:
        """How many nodes of that role the router may use."""
        return int(self.metrics(self.base_url)[f"baton_router_nodes{{role={role},state=alive}}"])

    def known_nodes(self, role: str) -> int:
        """How many nodes of that role the router has not given up, answering or not."""
        metrics = self.metrics(self.base_url)
        return int(sum(metrics[f"baton_router_nodes{{role={role},state={state}}}"] for state in ("alive", "silent")))

    def holdings(self) -> dict[str, Any]:
        """Everything that must be as it was once nothing is being served."""
        held: dict[str, Any] = {}
        for node_id, record in sorted(self.records().items()):
            metrics = self.metrics(record.http_address)
            for name in (
                "baton_kv_blocks{state=free}",
                "baton_kv_blocks{state=owned}",
                "baton_kv_blocks{state=quarantined}",
                "baton_kv_blocks_orphaned",
                "baton_kv_open_tickets",
                "baton_kv_open_pushes",
                "baton_requests_running",
                "baton_requests_waiting",
            ):
                held[f"{node_id} {name}"] = metrics[name]
        router = self.metrics(self.base_url)
        for name in ("requests_in_flight", "requests_waiting", "dispatches_open"):
            held[f"router {name}"] = router[f"baton_router_{name}"]
        held["nodes in Redis"] = sorted(self.records())
        return held

    def sockets(self) -> dict[str, int]:
        """Open sockets of every process."""
        pids = {**self.pids, **{name: process.pid for name, process in self.extra.items()}}
        return {name: _num_sockets(pid) for name, pid in pids.items() if name != "redis" and psutil.pid_exists(pid)}

    def add_node(self, role: str, name: str, *options: str) -> None:
        """Start one more node by hand and wait until the router may use it."""
        before = self.alive_nodes(role)
        command = [sys.executable, "-m", f"{role}_node", "--node-id", name, "--threads", "1", *options]
        with (self.log_dir / f"{name}.log").open("wb") as log:
            self.extra[name] = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, ENV_REDIS_URL: self.redis_url, ENV_SECRET: self.secret},
            )
        wait_for(f"{name} joins", lambda: self.alive_nodes(role) == before + 1, START_S)

    def kill(self, name: str) -> None:
        """SIGKILL one process of this deployment."""
        if (process := self.extra.pop(name, None)) is not None:
            process.kill()
            process.wait()
        else:
            os.kill(self.pids[name], signal.SIGKILL)

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """End it as a user would; returns the exit status of `baton up`."""
        for process in self.extra.values():
            process.terminate()
        for process in self.extra.values():
            process.wait(30)
        if self.launcher.poll() is None:
            self.launcher.send_signal(signum)
        return self.launcher.wait(60)

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(
            f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in sorted(self.log_dir.glob("*.log"))
        )


@contextmanager
def running_stack(
    model_dir: Path, *, prefill: int = 1, decode: int = 1, options: tuple[str, ...] = (), api_key: str | None = None
) -> Iterator[Stack]:
    """`baton up` on a free port, ready with all its nodes; stopped at the end, whatever happens."""
    own = {} if api_key is None else {ENV_API_KEY: api_key}
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        state_file, secret = Path(folder) / "state.json", secrets.token_hex(16)
        command = [
            *(sys.executable, "-m", "cli.main", "up", "--model", str(model_dir), "--port", "0"),
            *("--prefill", str(prefill), "--decode", str(decode), "--kv-memory-gb", "0.5"),
            *("--log-dir", folder, "--state-file", str(state_file), *options),
        ]
        launcher = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **own, ENV_SECRET: secret}, stdout=subprocess.DEVNULL
        )
        try:
            wait_for("baton up", lambda: state_file.exists() or launcher.poll() is not None, START_S)
            assert launcher.poll() is None, "baton up ended while starting"
            state = msgspec.json.decode(state_file.read_bytes())
            stack = Stack(
                state["base_url"], state["redis_url"], secret, Path(folder), state["pids"], launcher, {}, headers
            )
            for role, count in (("prefill", prefill), ("decode", decode)):
                wait_for(f"{count} {role} nodes", lambda r=role, n=count: stack.alive_nodes(r) == n)  # type: ignore[misc]
            try:
                yield stack
            except BaseException:
                print(stack.logs())
                raise
            finally:
                stack.stop()
        finally:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()


def _num_sockets(pid: int) -> int:
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except FileNotFoundError:
            continue
    return count
