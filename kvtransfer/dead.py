"""Lives of nodes that were declared dead: they may not come back."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from kvtransfer.ticket import PeerId

_REMEMBERED: Final = 1024


class DeadPeers:
    """Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: OrderedDict[PeerId, None] = OrderedDict()

    def add(self, peer: PeerId) -> None:
        with self._lock:
            self._peers[peer] = None
            while len(self._peers) > _REMEMBERED:
                self._peers.popitem(last=False)

    def __contains__(self, peer: object) -> bool:
        with self._lock:
            return peer in self._peers
