"""CPU kernels built ahead for machines without a compiler, such as containers.

``python -m kernels.cpu.prebuilt`` builds one library for each instruction-set level below into the Python
installation itself; a machine takes the highest level that its CPU has.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Final

from kernels.cpu.build import COMPILERS, BuildError, build, source_digest

log = logging.getLogger(__name__)

FOLDER: Final = Path(sys.prefix) / "share" / "baton-kernels"
# The x86-64 psABI levels, highest first, and the features of each as the kernel lists them.
LEVELS: Final = {
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"}),
    "x86-64-v3": frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"}),
}


def find_prebuilt(folder: Path = FOLDER) -> Path | None:
    """The best library in ``folder`` that this CPU can run and that was built from the present source, or None."""
    features = _cpu_features()
    for level, needed in LEVELS.items():
        library = folder / _name(level)
        if needed <= features and library.is_file():
            return library
    return None


def prebuild(folder: Path = FOLDER) -> list[Path]:
    """Build every level into ``folder``. Raises :class:`kernels.cpu.build.BuildError`."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for level in LEVELS:
        target = folder / _name(level)
        shutil.copyfile(build(folder / "work", COMPILERS, level), target)
        made.append(target)
    shutil.rmtree(folder / "work")
    return made


def _name(level: str) -> str:
    return f"cpu-{level}-{source_digest()}.so"


def _cpu_features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def main() -> int:
    """Build into the running Python installation; exit status 1 if that is not possible."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        for path in prebuild():
            log.info("%s", path)
    except BuildError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
