"""Memory of a pool that other processes of this host may map and read, so that they copy blocks at memcpy's rate.

UCX copies between processes with ``process_vm_readv``, which gives less than half of that. Which blocks may be read
when is not decided here: see `kvtransfer.ucx_offers`.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import secrets
import stat
import struct
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

_TOKEN_BYTES: Final = 16
_NAME: Final = struct.Struct(f">IIQ{_TOKEN_BYTES}s")  # pid, fd, bytes, token
# Linux has it, Python's fcntl not: nobody can map the memory writable from now on.
_F_SEAL_FUTURE_WRITE: Final = 0x10
# Taking pages out of a mapping takes 24 ms a GiB, and Python does it with the GIL held.
_RELEASED_AT_ONCE: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class MemoryName:
    """Where a peer on the same host finds ``num_bytes`` of memory, and the ``token`` that shows that it is this one."""

    pid: int
    fd: int
    num_bytes: int
    token: bytes

    def pack(self) -> bytes:
        """For a message."""
        return _NAME.pack(self.pid, self.fd, self.num_bytes, self.token)


def unpack_name(data: bytes) -> MemoryName | None:
    """What `MemoryName.pack` made; None for anything else."""
    return MemoryName(*_NAME.unpack(data)) if len(data) == _NAME.size else None


class SharedMemory:
    """Zeroed memory that takes address space only, until it is written: an anonymous file, mapped here.

    Others may only read it, and it never shrinks below them. It lives as long as ``buffer`` or a view of it does, and
    somewhere else as long as it is mapped there; its name is good as long as this object lives.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError where there is no such thing, or no room for it."""
        if _is_counted_strictly():
            # A file's pages are counted when they are written, too late for any answer but the end of the process.
            raise OSError("vm.overcommit_memory is 2, which can only refuse private memory in time")
        token = secrets.token_bytes(_TOKEN_BYTES)
        fd = os.memfd_create("baton-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, num_bytes + _TOKEN_BYTES)
        os.pwrite(fd, token, num_bytes)
        self.buffer = mmap.mmap(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self.name = MemoryName(os.getpid(), fd, num_bytes, token)


class PeerMemory:
    """A peer's memory, to be read only, as flat ``bytes``. Mapped as long as this object or a view of it lives."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    def release(self) -> None:
        """Make letting go of it quick; much memory on a thread of its own. Nobody reads it any more."""
        if len(self._memory) > _RELEASED_AT_ONCE:
            threading.Thread(target=_release, args=(self._memory,), name="kv-unmap", daemon=True).start()


def _release(memory: mmap.mmap) -> None:
    for start in range(0, len(memory), _RELEASED_AT_ONCE):
        memory.madvise(mmap.MADV_DONTNEED, start, min(_RELEASED_AT_ONCE, len(memory) - start))


def _is_counted_strictly() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def map_peer(name: MemoryName) -> PeerMemory | None:
    """The memory that a peer named; None if it is not on this host or may not be seen from here.

    Processes see each other if they share the PID namespace and the user, as they must for UCX's own copies.
    """
    path = f"/proc/{name.pid}/fd/{name.fd}"
    size = name.num_bytes + _TOKEN_BYTES
    try:
        # Looked at first: with another PID namespace it is some other process's file, and opening may do something.
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # A file that could be cut off would end us in the middle of a copy.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size:
            return None
        if not hmac.compare_digest(os.pread(fd, _TOKEN_BYTES, name.num_bytes), name.token):
            return None
        return PeerMemory(mmap.mmap(fd, name.num_bytes, prot=mmap.PROT_READ))
    except (OSError, ValueError, OverflowError):
        return None
    finally:
        os.close(fd)
