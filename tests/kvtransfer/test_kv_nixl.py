"""NIXL keeps the same contract as the others, in processes of its own: it must not meet UCXX."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kv_harness import ENV_SCHEME

from kvtransfer import ucx
from kvtransfer.errors import TransportUnavailableError
from kvtransfer.select import open_plane

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RUN_TESTS = "import sys, pytest; from kvtransfer.vendor import leave; sys.exit(leave(pytest.main(sys.argv[1:])))"

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


@needs_nixl
@pytest.mark.parametrize(
    "suite",
    ["test_kv_broken.py", "test_kv_contract.py", "test_kv_damage.py", "test_kv_processes.py", "nixl_road_cases.py"],
)
def test_in_a_process_of_its_own(suite):
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=short", str(HERE / suite)]
    done = run(RUN_TESTS, *options, UCX_TLS="tcp", **{ENV_SCHEME: "nixl"})
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout


def open_one(*schemes: str) -> None:
    open_plane(schemes, np.zeros((4, 64), np.uint8), ("n", 1, "f"), secret=None, wakeup=lambda: None).close()


def test_never_beside_ucxx():
    with pytest.raises(TransportUnavailableError, match="exclude each other"):
        open_one("nixl", "ucx")
    ucx.load()
    with pytest.raises(TransportUnavailableError, match="uses ucxx already"):
        open_one("nixl")
    assert "nixl_cu12" not in sys.modules


OPEN = """
import os, sys
import numpy as np
from kvtransfer.errors import TransportUnavailableError
from kvtransfer.select import open_plane
from kvtransfer.vendor import leave
def open_one(scheme, **options):
    return open_plane([scheme], np.zeros((4, 64), np.uint8), ("n", 1, "f"), secret=None, wakeup=lambda: None, **options)
def refused(scheme, **options):
    try:
        open_one(scheme, **options)
    except TransportUnavailableError as error:
        return str(error)
"""


@needs_nixl
def test_ucxx_never_beside_it_and_the_process_ends_well():
    done = run(
        OPEN + "open_one('nixl', require='tcp').close(); print(refused('ucx')); sys.exit(leave(7))", HOME="/nowhere"
    )
    assert done.returncode == 7, done.stderr
    assert "uses nixl_cu12 already" in done.stdout
    assert "'ucxx'" not in done.stdout


def test_without_it_the_error_says_so():
    code = OPEN + "sys.modules['nixl_cu12._bindings'] = None; print(refused('nixl', require='tcp')); sys.exit(leave(0))"
    assert "needs the nixl-cu12 package" in run(code).stdout


@needs_nixl
def test_a_demand_is_put_to_its_ucx_and_an_operator_who_says_otherwise_is_told():
    code = "plane = open_one('nixl', require='tcp'); print(os.environ['UCX_TLS'], plane.schemes); plane.close()"
    assert "tcp ('nixl',)" in run(f"{OPEN}{code}; sys.exit(leave(0))").stdout
    done = run(OPEN + "print(refused('nixl', require='rdma')); sys.exit(leave(0))", UCX_TLS="tcp")
    assert "rdma is required, but UCX_TLS=tcp is set" in done.stdout


@needs_nixl
def test_a_host_without_a_card_is_told_what_that_means():
    if os.path.isdir("/sys/class/infiniband"):
        pytest.skip("this host may have it")
    done = run(OPEN + "print(refused('nixl')); sys.exit(leave(0))")
    assert "no card" in done.stdout
    assert "--require-transport tcp" in done.stdout


@needs_nixl
def test_a_host_without_rdma_cannot_serve_where_it_is_required():
    if os.path.isdir("/sys/class/infiniband"):
        pytest.skip("this host may have it")
    done = run(OPEN + "print(refused('nixl', require='rdma')); sys.exit(leave(0))")
    assert "NIXL cannot make an agent" in done.stdout
