"""Turns the registry's nodes into the policy's snapshot, and keeps the books of what this router has placed."""

from __future__ import annotations

import time

from cluster.wire import Refused
from router.directory_index import DirectoryIndex
from router.generation import Readiness
from router.pairing import why_apart
from router.policy import Booking, Busy, Candidate, Demand, NoPair, Placement, place
from router.queue import Wanted
from router.registry import Node, NodeRegistry

# A decode node's wish is kept within these: below, asking would spin; above, room would go unused.
MIN_RETRY_S = 0.05
MAX_RETRY_S = 5.0
UNANSWERED_RETRY_S = 1.0


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
        if isinstance(outcome, Placement):
            return self._book(outcome, wanted.demand)
        if isinstance(outcome, NoPair) and self._registry.is_one_joining(now):
            return Busy("a node is just joining")  # a restarted node, most likely: not worth an error
        return outcome

    def is_usable(self, placement: Placement) -> bool:
        """Whether both nodes are still believed alive."""
        found = (self._registry.get(placement.prefill), self._registry.get(placement.decode))
        return all(node is not None and node.usable for node in found)

    def granted(self, booking: Booking) -> None:
        """The decode node had room: others may ask it again."""
        if (decode := self._registry.get(booking.placement.decode)) is not None:
            decode.refused_until_s = 0.0
        booking.is_granted = True
        self._end_probe(booking)

    def refused(self, booking: Booking, refusal: Refused | None) -> float:
        """The decode node has no room, or (None) did not answer: do not ask it again before it thinks it has.

        Returns the seconds until then.
        """
        wish = UNANSWERED_RETRY_S if refusal is None else refusal.retry_after_s or 0.0
        pause_s = min(max(wish, MIN_RETRY_S), MAX_RETRY_S)
        if (decode := self._registry.get(booking.placement.decode)) is not None:
            decode.refused_until_s = time.monotonic() + pause_s
        self._end_probe(booking)
        return pause_s

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
        self._end_probe(booking)
        if (decode := self._registry.get(booking.placement.decode)) is not None:
            decode.own_requests -= booking.num_choices
            if booking.is_granted and decode.refused_until_s:
                decode.refused_until_s = min(decode.refused_until_s, time.monotonic())  # there may be room now

    def readiness(self) -> Readiness:
        """Whether a pair that may work together is alive."""
        now = time.monotonic()
        prefills, decodes = self._registry.nodes("prefill"), self._registry.nodes("decode")
        seen = [[_candidate(node, now) for node in nodes] for nodes in (prefills, decodes)]
        outcome = place(Demand(prompt_len=1, total_len=1), seen[0], seen[1], {})
        if not isinstance(outcome, NoPair):
            return Readiness(True, "")
        # The policy knows that no two fit; in what they differ their records say.
        apart = [why_apart(prefill.record, decode.record) for prefill in prefills for decode in decodes]
        return Readiness(False, str(apart[0]) if apart and None not in apart else outcome.reason)

    def max_request_tokens(self) -> int | None:
        """Prompt plus output that the roomiest usable nodes can hold."""
        sizes = [
            max((_capacity(node) for node in self._registry.nodes(role)), default=None)
            for role in ("prefill", "decode")
        ]
        known = [size for size in sizes if size is not None]
        return min(known) if len(known) == len(sizes) else None

    def max_answer_tokens(self, prompt_len: int, num_choices: int) -> int | None:
        """Largest output of each of ``num_choices`` answers to a prompt that the roomiest decode node can hold."""
        sizes = []
        for node in self._registry.nodes("decode"):
            block_size, num_full = node.record.block_size, prompt_len // node.record.block_size
            own_tokens = (node.record.num_blocks - num_full) // num_choices * block_size
            # The KV of the last token is never stored.
            sizes.append(min(num_full * block_size + own_tokens + 1, _capacity(node)) - prompt_len)
        return max(sizes, default=None)

    def _book(self, placement: Placement, demand: Demand) -> Booking:
        booking = Booking(placement, demand.prompt_len, demand.num_choices)
        if (prefill := self._registry.get(placement.prefill)) is not None:
            prefill.own_tokens += demand.prompt_len
        if (decode := self._registry.get(placement.decode)) is not None:
            decode.own_requests += demand.num_choices
            booking.is_probe = demand.num_choices > 0 and decode.refused_until_s > 0
            decode.probing = decode.probing or booking.is_probe
        return booking

    def _end_probe(self, booking: Booking) -> None:
        if booking.is_probe and (decode := self._registry.get(booking.placement.decode)) is not None:
            decode.probing = False
        booking.is_probe = False


def _candidate(node: Node, now: float) -> Candidate:
    load = node.load
    # What the node told, and what was placed since; but never less than what is surely there, the router's own.
    new_tokens = max(0, node.own_tokens - node.own_tokens_reported)
    new_requests = max(0, node.own_requests - node.own_requests_reported)
    return Candidate(
        party=node.party,
        fingerprint=node.record.fingerprint,
        block_size=node.record.block_size,
        capacity_tokens=_capacity(node),
        waiting_tokens=max(load.waiting_tokens + new_tokens, node.own_tokens),
        num_requests=max(load.num_running + load.num_waiting + new_requests, node.own_requests),
        free_blocks=load.free_blocks,
        total_blocks=node.record.num_blocks,
        refusing=node.probing or now < node.refused_until_s,
        refused_peers=node.refused_peers,
    )


def _capacity(node: Node) -> int:
    return min(node.record.num_blocks * node.record.block_size, node.record.max_model_len)
