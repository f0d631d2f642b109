"""A pool that others may map: what they see, and what is refused instead of mapped."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import shared_memory
from kvtransfer.errors import LayoutError
from kvtransfer.select import open_plane
from kvtransfer.shared_memory import MemoryName, SharedMemory, map_peer, unpack_name

SIZE = 3 * mmap.PAGESIZE + 5


def mapped(memory: SharedMemory) -> np.ndarray:
    found = map_peer(memory.name)
    assert found is not None
    return found.bytes


def test_what_is_written_shows_on_the_other_side():
    memory = SharedMemory(SIZE)
    view = mapped(memory)
    assert len(view) == SIZE
    assert not view.any()
    ours = np.frombuffer(memory.buffer, np.uint8)
    ours[SIZE - 1], ours[7] = 9, 3
    assert (view[SIZE - 1], view[7]) == (9, 3)


def test_others_may_only_read_and_nobody_can_cut_it_off():
    memory = SharedMemory(SIZE)
    view = mapped(memory)
    assert not view.flags.writeable
    path = f"/proc/{memory.name.pid}/fd/{memory.name.fd}"
    for size in (0, SIZE * 2):
        with pytest.raises(PermissionError):
            os.truncate(path, size)
    with open(path, "r+b", buffering=0) as file:
        with pytest.raises(PermissionError):
            file.write(b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), SIZE)


def test_a_view_outlives_its_memory_and_no_descriptor_stays():
    before = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory(SIZE)
    np.frombuffer(memory.buffer, np.uint8)[0] = 5
    view = mapped(memory)
    del memory
    assert view[0] == 5
    del view
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_not_the_memory_that_was_named():
    memory = SharedMemory(SIZE)
    name = memory.name
    for wrong in (
        replace(name, token=bytes(16)),
        replace(name, num_bytes=SIZE - 1),
        replace(name, num_bytes=SIZE + 1),
        replace(name, num_bytes=2**64 - 1),
        replace(name, fd=2**31),
        replace(name, pid=2**32 - 1),
        replace(name, pid=0),
    ):
        assert map_peer(wrong) is None
    assert map_peer(name) is not None


def test_only_a_file_that_cannot_shrink():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(SIZE) + b"t" * 16)
        file.flush()
        assert map_peer(MemoryName(os.getpid(), file.fileno(), SIZE, b"t" * 16)) is None
    fd = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(SIZE) + b"t" * 16)
    assert map_peer(MemoryName(os.getpid(), fd, SIZE, b"t" * 16)) is None
    os.close(fd)


def test_a_pipe_is_not_even_opened(monkeypatch):
    """In another PID namespace the path is some other process's file, and opening it may do something."""
    ends = os.pipe()
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    for end in ends:
        assert map_peer(MemoryName(os.getpid(), end, SIZE, b"t" * 16)) is None
        os.close(end)


WORD, TOKEN = st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16)


@given(WORD, WORD, st.integers(0, 2**64 - 1), TOKEN)
def test_a_name_survives_its_message(pid, fd, num_bytes, token):
    name = MemoryName(pid, fd, num_bytes, token)
    assert unpack_name(name.pack()) == name


@given(st.binary(max_size=80))
def test_other_bytes_are_no_name(data):
    name = unpack_name(data)
    assert name is None or name.pack() == data


def test_a_peers_memory_is_let_go_in_pieces(monkeypatch):
    monkeypatch.setattr(shared_memory, "_RELEASED_AT_ONCE", mmap.PAGESIZE)
    memory = SharedMemory(SIZE)
    ours = np.frombuffer(memory.buffer, np.uint8)
    ours[:] = 7
    theirs = map_peer(memory.name)
    assert theirs is not None
    assert theirs.bytes.all()
    assert resident_kb() > 0
    theirs.release()
    for thread in threading.enumerate():
        if thread.name == "kv-unmap":
            thread.join(10)
    assert resident_kb() == 0
    assert ours.all()


def resident_kb() -> int:
    """Of the mapping that is only read."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if "baton-kv-pool" in line and " r--s " in line]
    return sum(int(next(line for line in lines[start:] if line.startswith("Rss:")).split()[1]) for start in starts)


def test_memory_that_is_counted_strictly_is_not_shared(monkeypatch):
    monkeypatch.setattr(shared_memory, "_is_counted_strictly", lambda: True)
    with pytest.raises(OSError, match="overcommit"):
        SharedMemory(SIZE)


def test_a_pool_must_lie_where_its_memory_begins():
    memory = SharedMemory(SIZE)
    whole = np.frombuffer(memory.buffer, np.uint8)
    for pool in (np.zeros((4, 64), np.uint8), whole[64 : 64 + 256].reshape(4, 64)):
        with pytest.raises(LayoutError, match="shared memory"):
            open_plane(["tcp"], pool, ("n", 1, "f"), secret=None, wakeup=lambda: None, memory=memory)
    open_plane(
        ["tcp"], whole[:256].reshape(4, 64), ("n", 1, "f"), secret=None, wakeup=lambda: None, memory=memory
    ).close()
