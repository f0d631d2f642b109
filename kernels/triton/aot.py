"""Compiles every kernel for GPUs that need not be there, and reports what the compilers made of it.

A launcher called on CPU tensors under `recording` compiles instead of launching: signatures, alignment and
tile sizes are the very ones of a real call. ``ptxas``, ``cuobjdump`` and the AMD backend come in Triton's wheel.

Run as ``python -m kernels.triton.aot --out build/triton``, in a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.triton.aot_calls import Call, calls
from kernels.triton.launch import INTERPRETED


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to build for. ``shared_limit_bytes``: the most shared memory (LDS) one block may ask for."""

    gpu: Any
    shared_limit_bytes: int


TARGETS: Final = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """One kernel as built for one target.

    ``registers``: of a thread (vector registers on AMD). ``spill_bytes``: of local memory a thread needs because
    registers ran out. ``shared_bytes``: of shared memory (LDS) a block needs. ``seconds``: of compilation, near 0
    from the cache.
    """

    kernel: str
    variant: str
    target: str
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    seconds: float

    @property
    def defect(self) -> str | None:
        """Why this build must not ship, or None."""
        if self.spill_bytes:
            return f"SPILLS {self.spill_bytes} B"
        if self.shared_bytes > TARGETS[self.target].shared_limit_bytes:
            return f"OVER {TARGETS[self.target].shared_limit_bytes // 1024} KiB"
        return None


class _StubDriver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def recording(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Within, launches compile for ``target`` and do not run; yields the list of (kernel's name, compiled kernel).

    Raises RuntimeError in a process that interprets kernels. Replaces the process's Triton driver for its duration.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: there is nothing to compile")
    compiled: list[tuple[str, Any]] = []
    launch = JITFunction.run
    previous = triton.runtime.driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        # Kernels are cached by device number, which all targets share.
        self.device_caches.clear()
        compiled.append(
            (
                self.fn.__name__.removeprefix("_").removesuffix("_kernel"),
                launch(self, *args, grid=grid, warmup=True, **options),
            )
        )

    triton.runtime.driver.set_active(_StubDriver(TARGETS[target].gpu))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        triton.runtime.driver._active = previous


def build(target: str, selected: Sequence[Call]) -> list[KernelBuild]:
    """Compile the calls' kernels for ``target``, a name of `TARGETS`."""
    builds: list[KernelBuild] = []
    for call in selected:
        with recording(target) as compiled:
            began = time.perf_counter()
            call.launch()
            seconds = time.perf_counter() - began
        for kernel, binary in compiled:
            registers, spill_bytes = _resources(binary)
            builds.append(
                KernelBuild(
                    kernel=kernel,
                    variant=call.variant,
                    target=target,
                    num_warps=binary.metadata.num_warps,
                    registers=registers,
                    spill_bytes=spill_bytes,
                    shared_bytes=binary.metadata.shared,
                    seconds=round(seconds / len(compiled), 2),
                )
            )
    return builds


def _resources(binary: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory it spills to."""
    if "cubin" in binary.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
        # No kernel here has a local array of its own: all of its stack is spilled registers.
        return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)
    text = binary.asm["amdgcn"]
    return _number(r"\.vgpr_count:\s+(\d+)", text), max(
        _number(r"\.private_segment_fixed_size:\s+(\d+)", text), 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in the compiler's report:\n{text[:2000]}")
    return int(found[1])


def table(builds: Sequence[KernelBuild]) -> str:
    """The report for people: a line for each kernel and variant; registers / shared KiB / warps for each target."""
    targets = list(dict.fromkeys(one.target for one in builds))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for one in builds:
        text = f"{one.registers} / {one.shared_bytes / 1024:.1f} / {one.num_warps} {one.defect or ''}".rstrip()
        cells.setdefault((one.kernel, one.variant), {})[one.target] = text
    lines = [
        "registers a thread / shared KiB / warps",
        "",
        f"| kernel | variant | {' | '.join(targets)} |",
        f"|---|---|{'---|' * len(targets)}",
    ]
    for (kernel, variant), found in cells.items():
        lines.append(f"| {kernel} | {variant} | {' | '.join(found.get(target, '') for target in targets)} |")
    return "\n".join(lines) + "\n"


def write_report(builds: Sequence[KernelBuild], folder: Path) -> None:
    """Write ``build_report.json`` (every `KernelBuild` and its defect) and ``build_report.md`` (the table)."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(one) | {"defect": one.defect} for one in builds]
    (folder / "build_report.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "build_report.md").write_text(table(builds))


def _build_all(target: str, all_types: bool) -> list[KernelBuild]:
    return build(target, calls(all_types=all_types))


def main() -> int:
    """Build for the targets asked for; the exit code is 1 if a kernel spills or does not fit."""
    parser = argparse.ArgumentParser(description="compile the Triton kernels and report what they take")
    parser.add_argument("--out", type=Path, required=True, help="folder for build_report.json and build_report.md")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--all-types", action="store_true", help="float16 and float32 as well as bfloat16")
    options = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    targets = options.target or list(TARGETS)
    with ProcessPoolExecutor(min(len(targets), os.cpu_count() or 1), get_context("spawn")) as pool:
        builds = [one for some in pool.map(_build_all, targets, repeat(options.all_types)) for one in some]
    write_report(builds, options.out)
    return 1 if any(one.defect for one in builds) else 0


if __name__ == "__main__":
    sys.exit(main())
