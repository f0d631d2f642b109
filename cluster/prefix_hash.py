"""Names for prefixes: a chained BLAKE2b-128 over full blocks of token ids.

Two blocks share a name exactly if the whole text up to their end, the model layout, the cache salt and the
adapter are the same. Every part is length-prefixed, so that no two different inputs serialise alike
(vLLM issue 44701 is the fault this prevents).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice

HASH_BYTES = 16


def seed_hash(fingerprint: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """Parent of every first block."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"baton-prefix")
    for part in (fingerprint, cache_salt, adapter):
        raw = part.encode(errors="surrogatepass")  # a salt is a client's: any text has a name
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def child_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the block holding ``token_ids`` (each in [0, 2**32)) after the prefix ``parent``.

    ``parent`` needs no length in front: it always has :data:`HASH_BYTES` (`cluster/wire.py` checks it).
    """
    digest = blake2b(parent, digest_size=HASH_BYTES, person=b"baton-block")
    digest.update(len(token_ids).to_bytes(8, "little"))
    digest.update(b"".join(token.to_bytes(4, "little") for token in token_ids))
    return digest.digest()


def block_hashes(seed: bytes, token_ids: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Names of all full blocks of ``token_ids``, in order; O(len(token_ids))."""
    hashes: list[bytes] = []
    parent = seed
    for block in _full_blocks(token_ids, block_size):
        parent = child_hash(parent, block)
        hashes.append(parent)
    return tuple(hashes)


def _full_blocks(token_ids: Sequence[int], block_size: int) -> Iterator[list[int]]:
    ids = iter(token_ids)
    while len(block := list(islice(ids, block_size))) == block_size:
        yield block
