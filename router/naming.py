"""A prompt's prefix names, computed once for each KV layout that is asked for."""

from __future__ import annotations

from cluster.prefix_hash import block_hashes, seed_hash


class PromptNames:
    """Names of a prompt's full blocks. Different layouts (fingerprints) name the same tokens differently."""

    def __init__(self, token_ids: tuple[int, ...], cache_salt: str) -> None:
        self.token_ids = token_ids
        self._cache_salt = cache_salt
        self._by_layout: dict[tuple[str, int], tuple[bytes, tuple[bytes, ...]]] = {}

    def of(self, fingerprint: str, block_size: int) -> tuple[bytes, tuple[bytes, ...]]:
        """(seed, names of the full blocks) under that layout."""
        layout = (fingerprint, block_size)
        known = self._by_layout.get(layout)
        if known is None:
            seed = seed_hash(fingerprint, self._cache_salt)
            known = self._by_layout[layout] = (seed, block_hashes(seed, self.token_ids, block_size))
        return known
