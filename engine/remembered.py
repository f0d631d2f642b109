"""Small memories that every node keeps: keys it must never start again, and routers it has heard from."""

from __future__ import annotations

from collections import OrderedDict

from cluster.request import RequestKey
from cluster.wire import Party

TOMBSTONES = 50_000
ROUTER_SILENCE_S = 10.0
# Once the prompt is computed a transfer has nothing to wait for but the link: so long without a block, and it is over.
TRANSFER_SILENCE_S = 30.0


class Tombstones:
    """Keys that have ended here. A Reserve or Submit that arrives after its own Cancel must not start.

    Bounded: the oldest of :data:`TOMBSTONES` is forgotten, long after any message for it can still be on its way.
    """

    def __init__(self, capacity: int = TOMBSTONES) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[RequestKey, None] = OrderedDict()

    def add(self, key: RequestKey) -> None:
        """Remember that ``key`` is over."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._keys


class RouterWatch:
    """When each router was last heard. A router that is silent has lost its clients: its requests end."""

    def __init__(self, silence_s: float = ROUTER_SILENCE_S) -> None:
        self._silence_s = silence_s
        self._heard: dict[Party, float] = {}

    def heard(self, router: Party, now: float) -> None:
        """Note a message from ``router``."""
        self._heard[router] = now

    def take_silent(self, now: float) -> list[Party]:
        """Routers silent for too long, each reported once."""
        silent = [router for router, at in self._heard.items() if now - at > self._silence_s]
        for router in silent:
            del self._heard[router]
        return silent
