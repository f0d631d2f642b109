"""Building the native kernels: once, whole or not at all, and what happens where it cannot be done."""

from __future__ import annotations

import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kernels import backend
from kernels.backend import BackendError, select
from kernels.cpu.build import BuildError, build
from tests import backends


def compiler(folder: Path, script: str) -> str:
    """A compiler of our own making; ``$out`` is the file it is asked for."""
    path = folder / "fake-cxx"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_library_is_built_once_even_by_many(tmp_path: Path) -> None:
    fake = compiler(tmp_path, f"echo built >> {tmp_path}/log; sleep 0.1; echo library > $out")
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: build(cache, [fake]), range(4)))
    assert found == {build(cache, [fake])}
    assert (tmp_path / "log").read_text() == "built\n"
    assert found.pop().read_text() == "library\n"


def test_another_target_is_another_library(tmp_path: Path) -> None:
    fake = compiler(tmp_path, "echo library > $out")
    assert build(tmp_path, [fake], "native") != build(tmp_path, [fake], "haswell")


def test_a_failed_build_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    fake = compiler(tmp_path, "echo half > $out; echo no such header >&2; exit 3")
    with pytest.raises(BuildError, match=r"(?s)status 3.*no such header"):
        build(tmp_path / "cache", [fake])
    assert not list((tmp_path / "cache").glob("*.so"))


def test_no_compiler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BuildError, match=r"no-such-compiler.*install"):
        build(tmp_path, ["no-such-compiler"])
    with pytest.raises(BackendError, match="no-such-compiler"):
        select("cpu", "native", cache_dir=tmp_path, threads=1, compilers=["no-such-compiler"])
    with caplog.at_level(logging.WARNING):
        chosen = select("cpu", "auto", cache_dir=tmp_path, threads=1, compilers=["no-such-compiler"])
    assert chosen.name == "reference"
    assert "times as long" in caplog.text
    assert "install g++" in caplog.text


def test_a_library_that_does_not_load_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = compiler(tmp_path, "echo this is no library > $out")
    assert select("cpu", "auto", cache_dir=tmp_path, threads=1, compilers=[fake]).name == "reference"
    assert "not available" in caplog.text


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fake = compiler(tmp_path, "echo library > $out")
    with pytest.raises(BuildError, match="cannot write"):
        build(tmp_path / "file" / "cache", [fake])


def test_selection_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("cpu", "reference", cache_dir=tmp_path, threads=1).name == "reference"
    with pytest.raises(BackendError, match="no backend 'fast'"):
        select("cpu", "fast", cache_dir=tmp_path, threads=1)
    with pytest.raises(BackendError, match="tpu"):
        select("tpu", "auto", cache_dir=tmp_path, threads=1)
    library = backends.library("native")
    monkeypatch.setattr(backend, "build", lambda _cache, _compilers: library)
    for requested in ("auto", "native"):
        assert select("cpu", requested, cache_dir=tmp_path, threads=1).name == "native"


@pytest.mark.parametrize(
    ("device", "requested", "reason"),
    [
        ("cpu", "triton", "needs a GPU"),
        ("cuda", "native", "on the CPU"),
        ("cuda", "reference", "on the CPU"),
        pytest.param(
            "cuda", "auto", "no CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
        ),
    ],
)
def test_a_backend_of_another_device_is_refused(tmp_path: Path, device: str, requested: str, reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        select(device, requested, cache_dir=tmp_path, threads=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_served_by_triton(tmp_path: Path) -> None:
    assert select("cuda", "auto", cache_dir=tmp_path, threads=1).name == "triton"
