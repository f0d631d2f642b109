"""No child outlives `baton up`, even if it is killed."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from cluster.config import child_environment
from tests.cluster.redis_server import wait_until

_PARENT = """
import subprocess, sys
from cluster.config import child_environment
child = subprocess.Popen([sys.executable, "-m", "cluster.parent", "/bin/sleep", "600"], env=child_environment({}))
print(child.pid, flush=True)
child.wait()
"""


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        # It has become the program: from then on only the kernel can tell it.
        wait_until(lambda: child.cmdline()[:1] == ["/bin/sleep"])
        parent.kill()
        parent.wait()
        wait_until(lambda: _is_gone(child))
    finally:
        parent.stdout.close()
        if not _is_gone(child):
            child.kill()


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    env = {**child_environment({}), "BATON_PARENT_PID": str(gone.pid)}
    done = subprocess.run([sys.executable, "-m", "cluster.parent", "/bin/sleep", "600"], env=env, timeout=60)
    assert done.returncode < 0


def test_nobody_to_end_with() -> None:
    env = {name: value for name, value in os.environ.items() if name != "BATON_PARENT_PID"}
    done = subprocess.run([sys.executable, "-m", "cluster.parent", "/bin/true"], env=env, timeout=60)
    assert done.returncode == 0
