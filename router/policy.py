"""Where a request goes: one pure function from a snapshot of the nodes to a placement or the reason why not.

Filter, score, pick. Every score is in [0, 1]; ties go to the first name, so that the same snapshot always gives the
same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.wire import Party, RefusedPeer

MAX_WAITING_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable node. ``waiting_tokens`` are prompt tokens queued there, ``num_requests`` the sequences it holds;
    ``capacity_tokens`` is the longest request it can ever hold; it exchanges no blocks with ``refused_peers``.
    """

    party: Party
    fingerprint: str
    block_size: int
    capacity_tokens: int
    waiting_tokens: int = 0
    num_requests: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    refusing: bool = False
    refused_peers: tuple[RefusedPeer, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: ``prompt_len`` tokens now, ``total_len`` at the end of each of its choices.

    Without choices nothing is decoded: a full decode node is no reason to wait.
    """

    prompt_len: int
    total_len: int
    num_choices: int = 1

    def fits(self, node: Candidate) -> bool:
        """True if a decode node could ever hold it: the prompt's full blocks are there once, the rest per choice."""
        if self.total_len > node.capacity_tokens:
            return False
        if self.num_choices <= 1 or self.total_len <= self.prompt_len:
            return True
        num_full = self.prompt_len // node.block_size
        num_own = -(-self.total_len // node.block_size) - num_full
        return num_full + self.num_choices * num_own <= node.total_blocks


@dataclass(frozen=True, slots=True)
class Placement:
    """The pair that may serve the request. Each node names prefixes by blocks of its own size."""

    prefill: Party
    decode: Party
    fingerprint: str
    prefill_block_size: int
    decode_block_size: int


@dataclass(slots=True)
class Booking:
    """A placement with what this router has put down to its nodes' accounts; given back exactly once.

    ``num_choices`` sequences will be decoded.
    ``is_probe`` marks the one request that may ask a decode node again after it refused: until the answer is here
    nobody overtakes it there. ``is_granted`` once the decode node holds it.
    """

    placement: Placement
    prompt_tokens: int
    num_choices: int = 1
    is_probe: bool = False
    is_granted: bool = False
    open: bool = True


@dataclass(frozen=True, slots=True)
class Busy:
    """Usable pairs exist but none takes more work now: wait."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoPair:
    """No prefill node and decode node that may work together and could ever hold the request are alive."""

    reason: str


def place(
    demand: Demand,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    cached: Mapping[str, int],
) -> Placement | Busy | NoPair:
    """Choose a pair with equal fingerprints. ``cached[node id]`` are the prompt tokens a node's cache holds."""
    if not prefills or not decodes:
        missing = " and ".join(name for name, found in (("prefill", prefills), ("decode", decodes)) if not found)
        return NoPair(f"no {missing} node is alive")
    shared = {c.fingerprint for c in prefills} & {c.fingerprint for c in decodes}
    if not shared:
        return NoPair("prefill and decode nodes serve different models or KV layouts")
    # Only sizes that can never fit are filtered here; whether there is room now is the decode node's own answer.
    prefills = [c for c in prefills if demand.prompt_len <= c.capacity_tokens]
    decodes = [c for c in decodes if demand.fits(c)]
    shared = {c.fingerprint for c in prefills} & {c.fingerprint for c in decodes}
    if not shared:
        return NoPair("no nodes are alive that could hold a request of this length")
    refusals = [refusal_between(p, d) for p in prefills for d in decodes if p.fingerprint == d.fingerprint]
    if all(refusals):
        return NoPair(min(str(reason) for reason in refusals))
    open_prefills = [c for c in prefills if c.fingerprint in shared and c.waiting_tokens < MAX_WAITING_TOKENS]
    open_decodes = [c for c in decodes if c.fingerprint in shared and not (c.refusing and demand.num_choices)]
    best: tuple[float, str, str, Candidate, Candidate] | None = None
    for decode in open_decodes:
        for prefill in open_prefills:
            if prefill.fingerprint != decode.fingerprint or refusal_between(prefill, decode) is not None:
                continue
            score = _prefill_score(prefill, demand, cached) + _decode_score(decode, demand, cached)
            entry = (-score, prefill.party.id, decode.party.id, prefill, decode)
            if best is None or entry[:3] < best[:3]:
                best = entry
    if best is None:
        return Busy("every decode node is full" if not open_decodes else "every usable prefill node's queue is full")
    prefill, decode = best[3], best[4]
    return Placement(prefill.party, decode.party, decode.fingerprint, prefill.block_size, decode.block_size)


def refusal_between(one: Candidate, other: Candidate) -> str | None:
    """Why these two nodes do not exchange blocks, if either says so of this life of the other."""
    for teller, about in ((one, other), (other, one)):
        for refused in teller.refused_peers:
            if (refused.node_id, refused.epoch) == (about.party.id, about.party.epoch):
                return f"{teller.party.id}: {refused.reason}"
    return None


def _prefill_score(node: Candidate, demand: Demand, cached: Mapping[str, int]) -> float:
    work = node.waiting_tokens + demand.prompt_len - min(cached.get(node.party.id, 0), demand.prompt_len - 1)
    return 1.0 / (1.0 + work / 512)


def _decode_score(node: Candidate, demand: Demand, cached: Mapping[str, int]) -> float:
    hit = min(cached.get(node.party.id, 0), demand.prompt_len) / demand.prompt_len
    room = node.free_blocks / node.total_blocks if node.total_blocks else 0.0
    return 0.5 * hit * room + 0.5 / (1.0 + node.num_requests)
