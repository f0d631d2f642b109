"""Every compute backend that can run here, by name."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import cache_dir
from kernels.backend import Backend
from kernels.cpu.build import COMPILERS, BuildError, build
from kernels.cpu.native import Native
from kernels.reference import Reference

# The instruction sets that the one source must serve, as g++ names them. The narrowest stands in for NEON's width.
_MARCH = {"native": "native", "native-avx2": "haswell", "native-narrow": "x86-64-v2"}
# A process that interprets Triton's kernels tests those only, at sizes that the interpreter can bear.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = pytest.param(
    "triton", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)
NATIVE = tuple(_MARCH) if platform.machine() == "x86_64" else ("native",)
NAMES = ("triton",) if INTERPRETED else ("reference", *NATIVE, ON_GPU)
SERVING = ("triton",) if INTERPRETED else ("reference", "native")


@functools.cache
def library(name: str) -> Path:
    """The built kernels; skips the test where there is no compiler, or no CPU, for them."""
    if name == "native-avx2" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    try:
        return build(cache_dir() / "kernels", COMPILERS, _MARCH[name])
    except BuildError as error:
        pytest.skip(str(error))


def make(name: str, threads: int = 1) -> Backend:
    """A fresh backend. One thread: the bits are the same, and threads that spin are slow on a busy machine."""
    if name == "triton":
        from kernels.triton.backend import Triton

        return Triton(torch.device("cpu" if INTERPRETED else "cuda"))
    if name == "triton-graphs":
        from kernels.triton.backend import Triton

        return Triton(torch.device("cpu"), graph_batches=(1, 3), recorder=_repeat)
    return Reference() if name == "reference" else Native(library(name), threads)


def _repeat(call: Callable[[], torch.Tensor]) -> Any:
    """Stands in for recording a graph, which needs a GPU."""
    from kernels.triton.graphs import Recorded

    output = call()
    return Recorded(lambda: output.copy_(call()), output)
