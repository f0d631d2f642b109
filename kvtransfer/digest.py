"""A digest for every block: what the receiver compares before it believes that a block has arrived.

The sender takes it when the block is final, before the transport reads it; it travels with the block's own
introduction; the receiver takes it again from its own pool once the block has landed. It is xxh3-64 of the block's
bytes, seeded with a mix of the block's identity: a digest made for another ticket, another position or another life
of the block does not fit. It finds faults, not attackers: those are kept out by the handshake.

``full`` reads every byte. ``sampled`` reads 33 lines of 64 bytes, so it always sees zeroed, swapped, foreign and
stale contents, and every contiguous damage of more than a sixteenth of the block plus 4 KiB; it is blind between
its samples. Which lines: every sixteenth of the block gives the first line of a 4 KiB page, where a token that is in
use lies even in a block that is nearly empty, and a line that depends on the block's position in its ticket, so that
damage that repeats from block to block does not miss all samples. The last line is always among them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from kvtransfer.device_pool import LINE_BYTES, DevicePool

DigestMode = Literal["off", "sampled", "full"]
DIGEST_MODES: Final[tuple[DigestMode, ...]] = get_args(DigestMode)

Block = npt.NDArray[np.uint8]

_PAGE_LINES: Final = 64
_NUM_PARTS: Final = 16
_NUM_PHASES: Final = 64
# Reading all of a small block costs no more than choosing what to read.
_ALWAYS_FULL_BYTES: Final = 16 << 10
_NOTHING: Final = np.zeros((0, 0), np.intp)
# Odd, so that multiplying by it modulo 2^64 loses nothing (the golden ratio).
_SPREAD: Final = 0x9E3779B97F4A7C15
_64_BITS: Final = (1 << 64) - 1
# So many has an index of a ticket (`kvtransfer.ticket`, which imports this file).
_INDEX_BITS: Final = 20


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Position ``index`` of a ticket, in the life ``generation`` of the receiver's block."""

    ticket_id: int
    index: int
    generation: int


def block_digest(block: Block, identity: BlockIdentity, mode: DigestMode) -> int:
    """64 bits of a contiguous block; 0 if ``mode`` is ``off``."""
    if mode == "off":
        return 0
    if mode == "full" or not _is_sampled(len(block)):
        return xxhash.xxh3_64_intdigest(block.data, _seed(identity))
    lines = _lines(block)
    sample = lines.take(_sampled_lines(len(lines))[identity.index % _NUM_PHASES], axis=0)
    return xxhash.xxh3_64_intdigest(sample.data, _seed(identity))


def _seed(identity: BlockIdentity) -> int:
    # Ticket and index have room beside each other, as in a UCX tag.
    place = (identity.ticket_id << _INDEX_BITS) | identity.index
    return (place ^ (identity.generation * _SPREAD)) & _64_BITS


def _is_sampled(block_bytes: int) -> bool:
    return block_bytes >= _ALWAYS_FULL_BYTES and block_bytes % LINE_BYTES == 0


def _lines(blocks: Block) -> npt.NDArray[np.uint64]:
    """``[..., bytes]`` as ``[all lines, 8 words]``: numpy copies a row of words several times faster than of bytes."""
    return blocks.view(np.uint64).reshape(-1, LINE_BYTES // 8)


@lru_cache(maxsize=8)
def _sampled_lines(num_lines: int) -> tuple[npt.NDArray[np.intp], ...]:
    """For each phase, the lines that are read. The same on every node for ever: it is part of the wire format."""
    starts = np.arange(_NUM_PARTS) * num_lines // _NUM_PARTS
    first_of_page = starts // _PAGE_LINES * _PAGE_LINES
    part = num_lines // _NUM_PARTS
    phases = []
    for phase in range(_NUM_PHASES):
        # Fibonacci hashing spreads (phase, part) evenly without a generator whose algorithm might change.
        spread = ((phase * _NUM_PARTS + np.arange(_NUM_PARTS)) * 0x9E3779B1) % (1 << 32)
        phases.append(np.concatenate((first_of_page, starts + spread * part // (1 << 32), [num_lines - 1])))
    return tuple(phases)


class Books:
    """What digests came to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.failures = 0
        self.seconds = 0.0

    def failed(self) -> None:
        """A block that landed does not hold what was sent."""
        with self._lock:
            self.failures += 1

    def spent(self, began: float) -> None:
        """A digest was begun then, by `time.perf_counter`."""
        spent = time.perf_counter() - began
        with self._lock:
            self.seconds += spent


class Digester:
    """Takes the digests of one pool and keeps the books on it. ``mode`` is what this pool's receiver asks for.

    Thread-safe. The pool is borrowed; blocks are only read.
    """

    def __init__(self, pool: npt.NDArray[np.uint8], mode: DigestMode) -> None:
        self.mode: DigestMode = mode
        self.books = Books()
        self._pool = pool
        block_bytes = pool.shape[1]
        # Made once: cutting a block into lines takes longer than reading the samples.
        self._lines = _lines(pool).reshape(len(pool), -1, LINE_BYTES // 8) if _is_sampled(block_bytes) else None
        self._phases = _sampled_lines(block_bytes // LINE_BYTES) if self._lines is not None else ()
        self._sampled = np.stack(self._phases) if self._phases else _NOTHING

    @property
    def failures(self) -> int:
        """Blocks that landed and did not hold what was sent."""
        return self.books.failures

    @property
    def seconds(self) -> float:
        """Spent on digests, sending and receiving."""
        return self.books.seconds

    def take(self, block_id: int, identity: BlockIdentity, mode: DigestMode) -> int:
        """The digest of a local block, for a receiver that asks for ``mode``."""
        if mode == "off":
            return 0
        began = time.perf_counter()
        if mode == "sampled" and self._lines is not None:
            sample = self._lines[block_id].take(self._phases[identity.index % _NUM_PHASES], axis=0)
            digest = xxhash.xxh3_64_intdigest(sample, _seed(identity))
        else:
            digest = block_digest(self._pool[block_id], identity, mode)
        self.books.spent(began)
        return digest

    def take_of(self, block: Block, identity: BlockIdentity, mode: DigestMode) -> int:
        """The digest of a block that is not in the pool."""
        if mode == "off":
            return 0
        began = time.perf_counter()
        digest = block_digest(block, identity, mode)
        self.books.spent(began)
        return digest

    def take_all(self, blocks: Sequence[tuple[int, BlockIdentity]], mode: DigestMode) -> list[int]:
        """The digests of several local blocks; the samples of all are read in one go."""
        if mode == "off":
            return [0] * len(blocks)
        began = time.perf_counter()
        if mode == "sampled" and self._lines is not None:
            digests = self._sample(blocks, self._lines)
        else:
            digests = [block_digest(self._pool[block_id], identity, mode) for block_id, identity in blocks]
        self.books.spent(began)
        return digests

    def _sample(self, blocks: Sequence[tuple[int, BlockIdentity]], lines: npt.NDArray[np.uint64]) -> list[int]:
        block_ids = np.fromiter((block_id for block_id, _ in blocks), np.intp, len(blocks))
        phases = np.fromiter((identity.index % _NUM_PHASES for _, identity in blocks), np.intp, len(blocks))
        rows = self._sampled[phases] + (block_ids * lines.shape[1])[:, None]
        samples = lines.reshape(-1, lines.shape[2]).take(rows, axis=0)
        return [
            xxhash.xxh3_64_intdigest(sample, _seed(identity))
            for sample, (_, identity) in zip(samples, blocks, strict=True)
        ]

    def fits(self, block_id: int, identity: BlockIdentity, digest: int | None) -> bool:
        """Whether a block that landed holds what its sender says. A block that came without a digest does not."""
        if self.mode == "off" or (digest is not None and digest == self.take(block_id, identity, self.mode)):
            return True
        self.books.failed()
        return False


class DeviceDigester(Digester):
    """The same digests of a pool on a GPU. ``host`` is the digester of its twin, which keeps the books on both."""

    def __init__(self, twin: npt.NDArray[np.uint8], host: Digester, device: DevicePool) -> None:
        super().__init__(twin, host.mode)
        self.books = host.books
        self._device = device

    def take(self, block_id: int, identity: BlockIdentity, mode: DigestMode) -> int:
        """See `Digester`."""
        return self.take_all([(block_id, identity)], mode)[0]

    def take_all(self, blocks: Sequence[tuple[int, BlockIdentity]], mode: DigestMode) -> list[int]:
        """See `Digester`. One copy from the GPU for all."""
        if mode == "off" or not blocks:
            return [0] * len(blocks)
        began = time.perf_counter()
        lines = None
        if mode == "sampled" and self._lines is not None:
            lines = np.stack([self._phases[identity.index % _NUM_PHASES] for _, identity in blocks])
        copies = self._device.read([block_id for block_id, _ in blocks], lines)
        digests = [
            xxhash.xxh3_64_intdigest(np.ascontiguousarray(copy).data, _seed(identity))
            for copy, (_, identity) in zip(copies, blocks, strict=True)
        ]
        self.books.spent(began)
        return digests
