"""The placement policy as a table: a snapshot in, a decision out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cluster.wire import Party, RefusedPeer
from router.policy import MAX_WAITING_TOKENS, Busy, Candidate, Demand, NoPair, Placement, place


def node(name: str, fingerprint: str = "f", capacity: int = 1000, **more: int | bool) -> Candidate:
    options = {"free_blocks": 64, "total_blocks": 64, **more}
    return Candidate(Party(name, 1, f"tcp://{name}:1"), fingerprint, 16, capacity, **options)  # type: ignore[arg-type]


P0, P1, D0, D1 = node("p0"), node("p1"), node("d0"), node("d1")
SMALL = Demand(prompt_len=32, total_len=48)
SCORED = Demand(prompt_len=32, total_len=32, num_choices=0)


def test_a_full_decode_node_is_no_reason_to_wait_where_nothing_is_decoded() -> None:
    full = replace(D0, refusing=True)
    assert isinstance(place(SMALL, [P0], [full], {}), Busy)
    assert isinstance(place(SCORED, [P0], [full], {}), Placement)
    assert isinstance(place(SCORED, [replace(P0, waiting_tokens=MAX_WAITING_TOKENS)], [full], {}), Busy)


@pytest.mark.parametrize(
    ("prefills", "decodes", "cached", "expected"),
    [
        # ties go to the first name, in whatever order the nodes come
        ([P0, P1], [D0, D1], {}, ("p0", "d0")),
        ([P1, P0], [D1, D0], {}, ("p0", "d0")),
        # the shorter queue
        ([replace(P0, waiting_tokens=1), P1], [D0], {}, ("p1", "d0")),
        # the node with fewer requests
        ([P0], [replace(D0, num_requests=1), D1], {}, ("p0", "d1")),
        # a prefix hit on either side
        ([P0, P1], [D0], {"p1": 16}, ("p1", "d0")),
        ([P0], [D0, D1], {"d1": 32}, ("p0", "d1")),
        # a hit does not outweigh a long queue
        ([P0, replace(P1, waiting_tokens=2000)], [D0], {"p1": 32}, ("p0", "d0")),
        # a hit on a node without free blocks counts for nothing
        ([P0], [D0, replace(D1, free_blocks=0)], {"d1": 32}, ("p0", "d0")),
        # more hits than there is prompt (another request's names) are cut
        ([P0, P1], [D0], {"p1": 10**6}, ("p1", "d0")),
        # only pairs of one layout
        ([node("p0", "a"), node("p1", "b")], [node("d0", "b")], {}, ("p1", "d0")),
        ([node("p0", "a"), node("p1", "b", waiting_tokens=900)], [node("d0", "b"), node("d1", "c")], {}, ("p1", "d0")),
        # nodes that can never hold the request are not looked at
        ([replace(P0, capacity_tokens=31), P1], [replace(D0, capacity_tokens=47), D1], {}, ("p1", "d1")),
        # refusing nodes and full queues are passed over while others are there
        ([P0], [replace(D0, refusing=True), D1], {}, ("p0", "d1")),
        ([replace(P0, waiting_tokens=MAX_WAITING_TOKENS), P1], [D0], {"p0": 32}, ("p1", "d0")),
        # a pair that cannot exchange blocks as one of the two requires; another life of a node is another node
        ([replace(P0, refused_peers=(RefusedPeer("d0", 1, "tcp"),))], [D0, D1], {}, ("p0", "d1")),
        ([P0, P1], [replace(D0, refused_peers=(RefusedPeer("p0", 1, "tcp"),))], {}, ("p1", "d0")),
        ([replace(P0, refused_peers=(RefusedPeer("d0", 2, "tcp"),))], [D0], {}, ("p0", "d0")),
        # a node that reports nothing yet
        ([P0], [node("d0", free_blocks=0, total_blocks=0)], {}, ("p0", "d0")),
    ],
)
def test_placements(
    prefills: list[Candidate], decodes: list[Candidate], cached: dict[str, int], expected: tuple[str, str]
) -> None:
    outcome = place(SMALL, prefills, decodes, cached)
    assert isinstance(outcome, Placement)
    assert (outcome.prefill.id, outcome.decode.id) == expected
    assert (outcome.prefill_block_size, outcome.decode_block_size) == (16, 16)


@pytest.mark.parametrize(
    ("prefills", "decodes", "kind", "words"),
    [
        ([], [], NoPair, "no prefill and decode node"),
        ([P0], [], NoPair, "no decode node"),
        ([], [D0], NoPair, "no prefill node"),
        ([node("p", "a")], [node("d", "b")], NoPair, "different"),
        ([P0], [node("d", capacity=47)], NoPair, "length"),
        ([node("p", capacity=31)], [D0], NoPair, "length"),
        # both sizes are there, but not in one layout
        ([node("p", "a", 31), node("q", "b")], [node("d", "a"), node("e", "b", 47)], NoPair, "length"),
        ([replace(P0, refused_peers=(RefusedPeer("d0", 1, "came out on tcp"),))], [D0], NoPair, "p0: came out on tcp"),
        ([P0], [replace(D0, refusing=True)], Busy, "decode"),
        ([replace(P0, waiting_tokens=MAX_WAITING_TOKENS)], [D0], Busy, "prefill"),
        # room on both sides, but of different layouts
        (
            [node("p", "a"), node("q", "b", waiting_tokens=5000)],
            [node("d", "a", refusing=True), node("e", "b")],
            Busy,
            "",
        ),
    ],
)
def test_refusals(prefills: list[Candidate], decodes: list[Candidate], kind: type, words: str) -> None:
    outcome = place(SMALL, prefills, decodes, {})
    assert isinstance(outcome, kind)
    assert words in outcome.reason  # type: ignore[union-attr]


candidates = st.lists(
    st.builds(
        node,
        st.sampled_from("abcdef"),
        st.sampled_from("fg"),
        st.integers(0, 200),
        waiting_tokens=st.integers(0, 6000),
        num_requests=st.integers(0, 100),
        free_blocks=st.integers(0, 64),
        refusing=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda candidate: candidate.party.id,
)


@given(
    candidates,
    candidates,
    st.integers(1, 150),
    st.integers(0, 50),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 99)),
)
@settings(deadline=None)
def test_any_snapshot_gives_one_decision(
    prefills: list[Candidate], decodes: list[Candidate], prompt_len: int, more: int, cached: dict[str, int]
) -> None:
    demand = Demand(prompt_len, prompt_len + more)
    outcome = place(demand, prefills, decodes, cached)
    for p, d in itertools.product((prefills, prefills[::-1]), (decodes, decodes[::-1])):
        assert place(demand, p, d, cached) == outcome
    fitting = [
        (p, d)
        for p in prefills
        for d in decodes
        if p.fingerprint == d.fingerprint and p.capacity_tokens >= prompt_len and d.capacity_tokens >= demand.total_len
    ]
    now = [(p, d) for p, d in fitting if p.waiting_tokens < MAX_WAITING_TOKENS and not d.refusing]
    if isinstance(outcome, Placement):
        assert (outcome.prefill, outcome.decode) in [(p.party, d.party) for p, d in now]
    else:
        assert not now
        assert isinstance(outcome, NoPair) == (not fitting)
