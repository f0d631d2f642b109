"""A Docker engine and Compose: those that are there, else Debian's, on a private socket and data folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testing.shell import StepError, run, say, succeeds, timed

_START_S: Final = 60
_STOP_S: Final = 60
_DATA_BYTES: Final = 8 << 30  # layers of both images and of their build stages: 5 GB
_ROOMY_BYTES: Final = _DATA_BYTES + (8 << 30)  # and four nodes beside them: 4 GB
_APT: Final = ["apt-get", "-y", "-qq", "-o", "DPkg::Lock::Timeout=120"]


@dataclass(frozen=True, slots=True)
class Engine:
    """``compose`` is the command that speaks to it, ``private`` whether we started it."""

    host: str | None
    compose: tuple[str, ...]
    private: bool

    @property
    def env(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {"DOCKER_HOST": self.host} if self.host else {}


@contextmanager
def engine(cache: Path) -> Iterator[Engine]:
    """An engine for the length of the block. A private one is stopped afterwards and leaves no mount and no rule.

    Raises :class:`StepError` if there is none and none can be had.
    """
    if succeeds(["docker", "info"], timeout_s=20):
        say("   using the Docker engine that is running")
        yield Engine(host=None, compose=_compose(), private=False)
        return
    install_engine()
    compose = _compose()
    with _private_engine(cache) as host:
        yield Engine(host=host, compose=compose, private=True)


def install_engine() -> bool:
    """Install what a private engine takes; False if an engine is running. Raises :class:`StepError`."""
    if succeeds(["docker", "info"], timeout_s=20):
        return False
    wanted = {"dockerd": "docker.io", "docker": "docker.io", "iptables": "iptables"}
    install(sorted({package for tool, package in wanted.items() if not shutil.which(tool)}))
    _compose()
    return True


def install(packages: list[str]) -> None:
    """``apt-get install`` what is missing; nothing for an empty list."""
    if not packages:
        return
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise StepError(
            f"needs a running Docker engine and an image registry, or {names} (installed by root on Debian)"
        )
    with timed(f"apt-get install {names}"):
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        run([*_APT, "update"], timeout_s=300, env=env)
        run([*_APT, "install", "--no-install-recommends", *packages], timeout_s=600, env=env)


def _compose() -> tuple[str, ...]:
    if succeeds(["docker", "compose", "version"], timeout_s=20):
        return ("docker", "compose")
    if not shutil.which("docker-compose"):
        install(["docker-compose"])
    return ("docker-compose",)


@contextmanager
def _private_engine(cache: Path) -> Iterator[str]:
    # Sockets need short paths and belong to root alone.
    runtime, data = Path("/run/baton-compose-test"), cache / "engine"
    pid_file = runtime / "docker.pid"
    _stop(pid_file, runtime)  # of a run that was killed
    _remove(runtime, data)
    runtime.mkdir(mode=0o700)
    data.mkdir(mode=0o700)
    if _available_memory() > _ROOMY_BYTES:
        # Gigabytes of layers that live for minutes: memory takes and drops them several times faster than a disk.
        run(["mount", "-t", "tmpfs", "-o", f"size={_DATA_BYTES},mode=700", "baton", str(data)], timeout_s=20)
    rules, forwarding = _network_state()
    host = f"unix://{runtime}/docker.sock"
    try:
        with timed("dockerd start"):
            _start(runtime, data, host, pid_file)
        yield host
    finally:
        with timed("dockerd stop"):
            _stop(pid_file, runtime)
            _restore_network(rules, forwarding)
            _remove(runtime, data)


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _start(runtime: Path, data: Path, host: str, pid_file: Path) -> None:
    command = ["dockerd", "--host", host, "--data-root", str(data), "--exec-root", str(runtime / "exec")]
    # No default bridge: nothing here uses it, and it would outlive the engine.
    command += ["--pidfile", str(pid_file), "--bridge", "none"]
    log = runtime / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    deadline = time.monotonic() + _START_S
    while not succeeds(["docker", "info"], timeout_s=10, env={"DOCKER_HOST": host}):
        if process.poll() is not None or time.monotonic() > deadline:
            raise StepError(f"dockerd did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def _stop(pid_file: Path, runtime: Path) -> None:
    """End the engine that was started on ``runtime``, and only that one."""
    try:
        pid = int(pid_file.read_text())
        ours = str(runtime).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return
    if not ours:
        return
    for sign in (signal.SIGTERM, signal.SIGKILL):
        os.kill(pid, sign)
        if _ended(pid, deadline=time.monotonic() + _STOP_S):
            return
    raise StepError(f"dockerd (pid {pid}) does not end")


def _ended(pid: int, deadline: float) -> bool:
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:  # of an earlier run: not our child
            if not Path(f"/proc/{pid}").exists():
                return True
        time.sleep(0.1)
    return False


def _remove(*folders: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for folder in folders:
        inside = [point for point in mounts if point == str(folder) or point.startswith(f"{folder}/")]
        for point in sorted(inside, key=len, reverse=True):
            run(["umount", "-l", point], timeout_s=20, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _network_state() -> tuple[str, str]:
    rules = run(["iptables-save"], timeout_s=20).stdout
    return rules, Path("/proc/sys/net/ipv4/ip_forward").read_text()


def _restore_network(rules: str, forwarding: str) -> None:
    """Put back packet rules and forwarding: dockerd changes both and leaves them when it ends."""
    kept = [line for line in rules.splitlines() if not line.startswith("#")]
    if "*filter" not in kept:
        kept += ["*filter", ":INPUT ACCEPT", ":FORWARD ACCEPT", ":OUTPUT ACCEPT", "COMMIT"]
    if "*nat" not in kept:
        kept += ["*nat", ":PREROUTING ACCEPT", ":INPUT ACCEPT", ":OUTPUT ACCEPT", ":POSTROUTING ACCEPT", "COMMIT"]
    restore = shutil.which("iptables-restore") or "/usr/sbin/iptables-restore"
    subprocess.run([restore], input="\n".join([*kept, ""]), text=True, timeout=20, check=False)  # noqa: S603
    Path("/proc/sys/net/ipv4/ip_forward").write_text(forwarding)
