"""Turns the registry's nodes into the policy's snapshot, and keeps the books of what this router has placed."""

from __future__ import annotations

import time

from cluster.wire import Refused
from router.directory_index import DirectoryIndex
from router.generation import Readiness
from router.policy import Booking, Busy, Candidate, Demand, NoPair, Placement, place
from router.queue import Wanted
from router.registry import Node, NodeRegistry


class Placer:
    """Between load reports (a few a second) the router counts its own placements, so that a burst is spread."""

    def __init__(self, registry: NodeRegistry, index: DirectoryIndex) -> None:
        self._registry = registry
        self._index = index

    def try_place(self, wanted: Wanted) -> Booking | Busy | NoPair:
        """Choose and book a pair for the request at the head of the line."""
        now = time.monotonic()
        prefills = [_candidate(node, now) for node in self._registry.nodes("prefill")]
        decodes = [_candidate(node, now) for node in self._registry.nodes("decode")]
        cached = {
            candidate.party.id: self._index.cached_tokens(candidate, wanted.names)
            for candidate in [*prefills, *decodes]
        }
        outcome = place(wanted.demand, prefills, decodes, cached)
        return self._book(outcome, wanted.demand) if isinstance(outcome, Placement) else outcome

    def refused(self, placement: Placement, refusal: Refused) -> None:
        """The decode node has no room: do not ask it again before it thinks it has."""
        node = self._registry.get(placement.decode)
        if node is not None and refusal.retry_after_s is not None:
            node.refused_until_s = time.monotonic() + refusal.retry_after_s

    def prefilled(self, booking: Booking) -> None:
        """Token 0 came: the prompt no longer waits on the prefill node."""
        if (prefill := self._registry.get(booking.placement.prefill)) is not None:
            prefill.own_tokens -= booking.prompt_tokens
        booking.prompt_tokens = 0

    def release(self, booking: Booking) -> None:
        """The dispatch is over."""
        if not booking.open:
            return
        booking.open = False
        self.prefilled(booking)
        if (decode := self._registry.get(booking.placement.decode)) is not None:
            decode.own_requests -= 1

    def readiness(self) -> Readiness:
        """Whether a pair that may work together is alive."""
        prefills = {node.record.fingerprint for node in self._registry.nodes("prefill")}
        decodes = {node.record.fingerprint for node in self._registry.nodes("decode")}
        if prefills & decodes:
            return Readiness(True, "")
        if prefills and decodes:
            return Readiness(False, "prefill and decode nodes serve different models, dtypes or block sizes")
        missing = " and ".join(name for name, found in (("prefill", prefills), ("decode", decodes)) if not found)
        return Readiness(False, f"no {missing} node is alive")

    def max_request_tokens(self) -> int | None:
        """Prompt plus output that the roomiest usable nodes can hold."""
        sizes = [
            max((_capacity(node) for node in self._registry.nodes(role)), default=None)
            for role in ("prefill", "decode")
        ]
        known = [size for size in sizes if size is not None]
        return min(known) if len(known) == len(sizes) else None

    def _book(self, placement: Placement, demand: Demand) -> Booking:
        if (prefill := self._registry.get(placement.prefill)) is not None:
            prefill.own_tokens += demand.prompt_len
        if (decode := self._registry.get(placement.decode)) is not None:
            decode.own_requests += 1
        return Booking(placement, demand.prompt_len)


def _candidate(node: Node, now: float) -> Candidate:
    load = node.load
    return Candidate(
        party=node.party,
        fingerprint=node.record.fingerprint,
        block_size=node.record.block_size,
        waiting_tokens=max(load.waiting_tokens, node.own_tokens),
        num_requests=max(load.num_running + load.num_waiting, node.own_requests),
        free_blocks=load.free_blocks,
        total_blocks=node.record.num_blocks,
        refusing=now < node.refused_until_s,
    )


def _capacity(node: Node) -> int:
    return min(node.record.num_blocks * node.record.block_size, node.record.max_model_len)
