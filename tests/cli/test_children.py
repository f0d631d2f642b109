"""Processes that `baton up` starts: none is left, whatever they do."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from cli import children as children_module
from cli.children import Child, Children
from cluster.config import ConfigError
from tests.cluster.redis_server import eventually

SLEEP = ["/bin/sleep", "600"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
]


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    made = Children(tmp_path)
    yield made
    await made.stop()
    assert all(not psutil.pid_exists(child.process.pid) for child in made)


async def test_stop_leaves_no_process(children: Children) -> None:
    started = [await children.start(f"sleep-{i}", SLEEP, env={}, stage=i % 2) for i in range(4)]
    assert all(child.alive for child in started)
    await children.stop()
    assert [child.process.returncode for child in started] == [-15] * 4
    await children.stop()


async def test_who_does_not_listen_is_killed(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "STOP_GRACE_S", 0.05)
    stubborn = [await children.start(f"stubborn-{i}", STUBBORN, env={}) for i in range(2)]
    await eventually(lambda: all("deaf" in child.tail() for child in stubborn))
    await children.stop()
    assert [child.process.returncode for child in stubborn] == [-9, -9]


async def test_later_stages_end_first(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router needs its nodes while it drains, the nodes need Redis to say goodbye."""
    order: list[str] = []
    stop = children_module._stop

    async def recording(child: Child) -> None:
        await stop(child)
        order.append(child.name)

    monkeypatch.setattr(children_module, "_stop", recording)
    for name, stage in (("redis", 0), ("prefill-0", 1), ("decode-0", 1), ("router", 2)):
        await children.start(name, SLEEP, env={}, stage=stage)
    await children.stop()
    assert order[0] == "router"
    assert sorted(order[1:3]) == ["decode-0", "prefill-0"]
    assert order[3] == "redis"


async def test_one_that_has_ended_is_noticed(children: Children) -> None:
    await children.start("sleep", SLEEP, env={})
    short = await children.start("short", ["/bin/sh", "-c", "echo why >&2; exit 3"], env={})
    gone = await children.first_exit(set())
    assert gone is short
    assert gone.process.returncode == 3
    assert gone.tail() == "why\n"


async def test_input_and_environment_arrive(children: Children) -> None:
    command = ["/bin/sh", "-c", 'cat; echo "$OWN"; echo "$BATON_PARENT_PID"']
    child = await children.start("cat", command, env={"OWN": "x"}, stdin=b"secret\n")
    await child.process.wait()
    assert child.tail().split() == ["secret", "x", str(psutil.Process().pid)]


async def test_one_that_ends_before_it_has_read_its_input(children: Children) -> None:
    child = await children.start("deaf", ["/bin/true"], env={}, stdin=b"x" * (4 << 20))
    await child.process.wait()
    assert child.process.returncode == 0


async def test_a_program_that_is_not_there(children: Children) -> None:
    with pytest.raises(ConfigError, match="ghost"):
        await children.start("ghost", ["/no/such/program"], env={})
    assert list(children) == []


async def test_a_long_log_is_shown_from_its_end(children: Children) -> None:
    child = await children.start("talker", ["/bin/sh", "-c", "seq 100000"], env={})
    await child.process.wait()
    assert child.tail().endswith("100000\n")
    assert len(child.tail()) <= children_module.TAIL_BYTES
