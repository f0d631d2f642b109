"""Builds the native CPU kernels once per machine and keeps them.

The library is named by everything that went into it, so a changed source, flag, compiler or CPU builds anew and
nothing ever has to be invalidated.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

COMPILERS: Final = ("g++", "clang++", "c++")
BUILD_LIMIT_S: Final = 300.0
_SOURCES: Final = ("linear.cpp", "attention.cpp", "rows.cpp", "decoder.cpp", "probe.cpp")
_HEADERS: Final = ("vec.h",)
# No -ffast-math: it may reorder sums, and a row's bits must not depend on what the compiler made of its neighbours.
_FLAGS: Final = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-w")


class BuildError(Exception):
    """The kernels cannot be built; the message says why and what to do."""


def build(cache_dir: Path, compilers: Sequence[str] = COMPILERS, march: str = "native") -> Path:
    """The library for this machine, built if it is not in ``cache_dir`` yet (about 10 s on one core).

    ``compilers``: names or paths, the first that exists is used; ``march``: the instruction set, as the compiler
    names it. Safe to call from several processes at once: one builds, the others wait. Raises :class:`BuildError`.
    """
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(compilers)}); install g++, or set CXX")
    command = [compiler, *_FLAGS, _target_flag(march)]
    library = cache_dir / f"cpu-{_digest(command)}.so"
    if library.is_file():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / f"{library.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                _compile(command, library)
    except OSError as error:
        raise BuildError(f"cannot write the native kernels to {cache_dir}: {error}") from error
    return library


def _compile(command: list[str], library: Path) -> None:
    log.info("building the CPU kernels with %s, once for this machine", command[0])
    began = time.monotonic()
    sources = [str(Path(__file__).parent / name) for name in _SOURCES]
    # A half-written library must never carry the final name: every later start would fail on it.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        try:
            result = subprocess.run(  # noqa: S603 - our own command, no shell
                [*command, *sources, "-o", str(built)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=BUILD_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} took over {BUILD_LIMIT_S:g} s") from error
        if result.returncode != 0 or not built.is_file():
            last = "\n".join(result.stderr.strip().splitlines()[-5:])
            raise BuildError(f"{command[0]} failed with status {result.returncode}:\n{last}")
        os.replace(built, library)
    log.info("built %s in %.1f s", library, time.monotonic() - began)


def _target_flag(march: str) -> str:
    # Where -march=native is not known (clang on ARM), -mcpu=native says the same.
    return f"-{'mcpu' if platform.machine() in ('aarch64', 'arm64') else 'march'}={march}"


def source_digest() -> str:
    """Names the present source and flags, whatever machine it is built for."""
    return _hash([*_FLAGS, *_source_texts()])


def _digest(command: Sequence[str]) -> str:
    return _hash([*command, _cpu_flags(), *_source_texts()])


def _source_texts() -> list[str]:
    return [(Path(__file__).parent / name).read_text() for name in (*_SOURCES, *_HEADERS)]


def _hash(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"
