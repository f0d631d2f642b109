"""Any order of events: two routers, two prefill and two decode nodes, and a hypothesis that picks what is next.

Channels keep the order of each (sender, receiver) pair and no other, and lose messages. Nodes have blocks of different
sizes, die and come back as other lives, routers cancel (a request, or one of its choices) and fall silent, connections
break with blocks on them, lose blocks, reorder and repeat them, steps fail. After every rule all rules of ownership
hold (:meth:`World.check`, and the checks inside the fakes); at the end nothing is left and everybody was answered.
Blocks are damaged on their way, and what nobody holds is overwritten after every rule: neither may reach an answer.
"""

from __future__ import annotations

import random

from damages import DAMAGES, LINK_FAULTS
from fake_node import MAX_MODEL_LEN, VOCABULARY
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import World

from cluster.request import SamplingParams

picks = st.integers(0, 1000)
# Tokens in a block of two prefill and two decode nodes: all alike, and pairs of which one, or none, divides the other.
BLOCK_SIZES = [(4, 4, 4, 4), (4, 2, 4, 8), (2, 3, 4, 4), (4, 8, 3, 2), (5, 7, 4, 3)]
# Families of prompts share prefixes; a tail makes them differ after any number of tokens.
FAMILIES = [[random.Random(seed).randrange(VOCABULARY) for _ in range(MAX_MODEL_LEN)] for seed in range(2)]
prompts = st.builds(
    lambda family, length, tail: tuple(family[:length] + tail),
    st.sampled_from(FAMILIES),
    st.one_of(st.sampled_from([1, 4, 8, 12]), st.integers(1, 24)),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (), (0,), (1, 2)]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    num_logprobs=st.sampled_from([None, 1]),
    choice=st.sampled_from([0, 0, 5]),
    num_choices=st.sampled_from([1, 1, 2, 3]),
)


class PairMachine(RuleBasedStateMachine):
    world: World

    @initialize(sizes=st.sampled_from(BLOCK_SIZES))
    def start(self, sizes: tuple[int, int, int, int]) -> None:
        self.world = World(block_sizes=dict(zip(("P0", "P1", "D0", "D1"), sizes, strict=True)))

    # --- what clients do ---

    @precondition(lambda self: self.world.parties("P") and self.world.parties("D"))
    @rule(prompt=prompts, sampling=samplings, pick=picks, deadline_s=st.sampled_from([1.0, 20.0, 60.0]))
    def submit(self, prompt: tuple[int, ...], sampling: SamplingParams, pick: int, deadline_s: float) -> None:
        prefills, decodes = self.world.parties("P"), self.world.parties("D")
        pair = (prefills[pick % len(prefills)], decodes[pick // 2 % len(decodes)])
        self.world.routers[pick // 4 % 2].start(prompt, sampling, pair, deadline_s)

    @precondition(lambda self: any(router.open_jobs() for router in self.world.routers))
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        jobs = [(router, job) for router in self.world.routers for job in router.open_jobs()]
        router, job = jobs[pick % len(jobs)]
        router.cancel(job)

    @precondition(lambda self: any(router.open_jobs() for router in self.world.routers))
    @rule(pick=picks)
    def one_choice_meets_its_stop_string(self, pick: int) -> None:
        """At any time, token 0 there or not: the node must not rely on more."""
        jobs = [(router, job) for router in self.world.routers for job in router.open_jobs() if job.granted]
        if jobs:
            router, job = jobs[pick % len(jobs)]
            waiting = sorted(job.waiting)
            router.drop(job, waiting[pick // 7 % len(waiting)])

    # --- what goes on ---

    @precondition(lambda self: self.world.moves())
    @rule(pick=picks)
    def go_on(self, pick: int) -> None:
        moves = self.world.moves()
        moves[pick % len(moves)]()

    @precondition(lambda self: self.world.moves())
    @rule(seed=picks, num_moves=st.integers(2, 60))
    def go_on_for_a_while(self, seed: int, num_moves: int) -> None:
        rng = random.Random(seed)
        for _ in range(num_moves):
            self.world.run(rng, 1)
            self.world.check()
            self.world.poison()

    @rule(seconds=st.sampled_from([0.3, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    # --- what goes wrong ---

    @rule(pick=st.integers(0, 1))
    def router_falls_silent(self, pick: int) -> None:
        self.world.advance(11.0, silent=self.world.routers[pick])

    @precondition(lambda self: self.world.wires())
    @rule(pick=picks)
    def connection_breaks(self, pick: int) -> None:
        wires = self.world.wires()
        wires[pick % len(wires)].cut("the cable was pulled")

    @precondition(lambda self: any(wire.flying for wire in self.world.wires()))
    @rule(pick=picks, name=st.sampled_from(sorted(DAMAGES)))
    def block_is_damaged(self, pick: int, name: str) -> None:
        wires = [wire for wire in self.world.wires() if wire.flying]
        DAMAGES[name](wires[pick % len(wires)].flying)

    @precondition(lambda self: any(wire.flying for wire in self.world.wires()))
    @rule(pick=picks, name=st.sampled_from(sorted(LINK_FAULTS)))
    def link_misbehaves(self, pick: int, name: str) -> None:
        wires = [wire for wire in self.world.wires() if wire.flying]
        LINK_FAULTS[name](wires[pick % len(wires)].flying)

    @precondition(lambda self: self.world.losable())
    @rule(pick=picks)
    def message_is_lost(self, pick: int) -> None:
        pairs = self.world.losable()
        self.world.channels[pairs[pick % len(pairs)]].popleft()

    @precondition(lambda self: any(node.plan is not None for node in self.world.nodes.values()))
    @rule(pick=picks)
    def step_fails(self, pick: int) -> None:
        nodes = [node for node in self.world.nodes.values() if node.plan is not None]
        node = nodes[pick % len(nodes)]
        assert node.plan is not None
        victim = node.plan.chunks[pick % len(node.plan.chunks)].key
        node.finish_step(lambda chunk: chunk.key == victim)

    @precondition(lambda self: len(self.world.nodes) > 1)
    @rule(pick=picks, comes_back=st.booleans())
    def node_dies(self, pick: int, comes_back: bool) -> None:
        name = sorted(self.world.nodes)[pick % len(self.world.nodes)]
        self.world.kill(name)
        if comes_back:
            self.world.start_node(name)

    @rule(pick=picks)
    def router_declares_a_life_over(self, pick: int) -> None:
        """Rightly or wrongly: a node that lives on is one that this router will not use again."""
        life = self.world.lives[pick // 2 % len(self.world.lives)]
        self.world.declare_dead(self.world.routers[pick % 2], life.party)

    @invariant()
    def ownership_is_sound(self) -> None:
        self.world.check()
        self.world.poison()

    def teardown(self) -> None:
        self.world.drain(random.Random(0))


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
