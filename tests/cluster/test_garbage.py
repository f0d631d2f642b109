from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

from cluster.garbage import permanent_objects, return_freed_memory


def test_what_is_made_inside_is_never_looked_at_again() -> None:
    before = gc.get_freeze_count()
    with permanent_objects():
        assert not gc.isenabled()
        made = [[index] for index in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + 1000
    assert not {id(each) for each in made} & {id(each) for each in gc.get_objects()}
    gc.unfreeze()


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), permanent_objects():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Pieces below what the allocator maps by themselves; some stay in between, so that the heap cannot just shrink."""
    pieces = [bytearray(60_000) for _ in range(2000)]
    kept = pieces[::50]
    del pieces
    before = _resident_bytes()
    return_freed_memory()
    assert before - _resident_bytes() > 50 << 20
    assert len(kept) == 40


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
