"""Memory of a process: spares the garbage collector what lives as long as it, gives back what is free."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made before the youngest are collected, and how many such collections make an older one; Python's are 700, 10,
# 10. A router's requests make thousands of objects that die with them: it collected for a fifteenth of its time.
_THRESHOLDS = (10_000, 20, 20)


def collect_seldom() -> None:
    """For a process that makes few cycles and many objects."""
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def permanent_objects() -> Iterator[None]:
    """No collection inside, and no later one looks at what was made until its end.

    For imports: those of a node make 200,000 objects. Walking them again and again took a tenth of its start, and a
    later full collection stopped every answer for 0.2 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def return_freed_memory() -> None:
    """Give the system what was freed and the allocator still keeps. Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
