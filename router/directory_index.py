"""The router's in-memory index of who holds which prefix. Lookups never wait; a task keeps it up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from cluster.directory import FOLLOW_S, DirectoryAwayError, DirectoryError, PrefixFollower, PrefixReader
from cluster.wire import Party
from router.naming import PromptNames
from router.policy import Candidate

log = logging.getLogger(__name__)


class DirectoryIndex:
    """Owns one reader for each node life; ``parties`` says which lives matter now."""

    def __init__(self, follower: PrefixFollower, parties: Callable[[], Iterable[Party]]) -> None:
        self._follower = follower
        self._parties = parties
        self._readers: dict[Party, PrefixReader] = {}
        self._complaints: dict[str, str] = {}

    def cached_tokens(self, node: Candidate, names: PromptNames) -> int:
        """Tokens of the longest prefix that the node's cache is known to hold."""
        reader = self._readers.get(node.party)
        if reader is None or not reader.names:
            return 0
        _seed, block_names = names.of(node.fingerprint, node.block_size)
        held = 0
        for name in block_names:
            if name not in reader.names:
                break
            held += 1
        return held * node.block_size

    async def run(self) -> None:
        """Follow the directory until cancelled."""
        while True:
            await self.update()
            await asyncio.sleep(FOLLOW_S)

    async def update(self) -> None:
        """Bring every reader up to date. What one node's keys hold never hides another's."""
        parties = set(self._parties())
        for gone in self._readers.keys() - parties:
            del self._readers[gone]
        complaints: dict[str, str] = {}
        for party in sorted(parties, key=lambda p: p.id):
            reader = self._readers.setdefault(party, self._follower.reader(party))
            try:
                await reader.update()
            except DirectoryAwayError as error:
                complaints["Redis"] = str(error)
                break
            except DirectoryError as error:
                complaints[party.id] = str(error)
        for about, complaint in complaints.items():
            if self._complaints.get(about) != complaint:
                log.warning("%s: %s", about, complaint)
        self._complaints = complaints
