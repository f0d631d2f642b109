"""Triton's tests that need a process of their own: interpreted kernels, builds for GPUs, and a real GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90", "gfx942")


def _python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(600)  # a minute on two idle cores, which a shared machine does not have
def test_kernels_in_the_interpreter() -> None:
    files = sorted((ROOT / "tests" / "kernels" / "triton_interpreted").glob("test_*.py"))
    slowest = [path for path in files if "attention" in path.name]
    assert slowest
    _pass_in_the_interpreter(slowest, [path for path in files if path not in slowest])


@pytest.mark.timeout(600)
def test_backend_in_the_interpreter() -> None:
    """The contract suite, and tokens of a tiny model equal to Hugging Face's."""
    pytest.importorskip("transformers")
    contract, tokens = ROOT / "tests/kernels/test_backends.py", ROOT / "tests/engine/test_small_exact.py"
    _pass_in_the_interpreter([contract], [tokens])


def _pass_in_the_interpreter(*groups: list[Path]) -> None:
    """Each group of test files in a process of its own, all at once."""
    pytest_alone = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    processes = [
        _python(*pytest_alone, *map(str, group), TRITON_INTERPRET="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        for group in groups
    ]
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert re.search(r"\d+ passed", output)
        assert "skipped" not in output


@pytest.mark.timeout(600)  # a minute on two idle cores, which a shared machine does not have
def test_every_kernel_builds_for_every_target_without_spills(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In bfloat16; with --full in all types. Leaves ``build/triton/build_report.json`` and ``.md``."""
    report = ROOT / "build" / "triton"
    (report / "build_report.json").unlink(missing_ok=True)
    # A cache of its own: a build that is never made again would never be checked again.
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    types = ("--all-types",) if request.config.getoption("--full") else ()
    process = _python("-W", "error", "-m", "kernels.triton.aot", *types, "--out", str(report), **cache)
    output, _ = process.communicate()
    assert (report / "build_report.json").exists(), output
    builds = json.loads((report / "build_report.json").read_text())
    assert [one for one in builds if one["defect"]] == []
    assert process.returncode == 0, output

    sources = (ROOT / "kernels" / "triton").glob("*.py")
    kernels = {name for path in sources for name in re.findall(r"^def _(\w+)_kernel\(", path.read_text(), re.M)}
    assert len(kernels) >= 8
    for target in TARGETS:
        assert {one["kernel"] for one in builds if one["target"] == target} == kernels
    assert all(one["registers"] > 0 for one in builds)
    assert (report / "build_report.md").read_text().count("|") > len(builds)


def test_a_process_that_interprets_cannot_build() -> None:
    process = _python("-m", "kernels.triton.aot", "--out", "build/never", TRITON_INTERPRET="1")
    output, _ = process.communicate()
    assert process.returncode == 2
    assert "TRITON_INTERPRET is set" in output


def test_the_benchmark_needs_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    process = _python("-m", "bench.gpu_kernels")
    output, _ = process.communicate()
    assert process.returncode == 2
    assert "there is no GPU here" in output


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    """Numbers right, bits independent of the batch, graphs equal to steps; rates are written down, not judged."""
    report = tmp_path / "gpu.json"
    process = _python("-m", "bench.gpu_kernels", "--json", str(report))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert {"decode_attention", "gather_blocks"} <= {
        row["name"].split(" ")[0] for row in json.loads(report.read_text())
    }
