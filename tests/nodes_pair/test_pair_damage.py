"""Blocks that do not hold what was sent: the request fails, no answer is made of them, and nobody finds them."""

from __future__ import annotations

import random
from collections import deque

import pytest
from damages import DAMAGES
from fake_kv import Flight
from fake_node import VOCABULARY
from test_pair_simulation import random_request
from world import World

from cluster.request import SamplingParams

# No two blocks alike, none of them zero.
PROMPT = tuple(1 + (i * i + i // 4) % (VOCABULARY - 1) for i in range(14))


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_block_fails_its_request_and_gets_no_name(name: str, victim: int) -> None:
    for seed in range(6):
        world = World(num_prefill=2, num_decode=1, num_routers=1)
        prefill, decode = world.nodes["P0"], world.nodes["D0"]
        pair = (prefill.party, decode.party)
        warm = world.routers[0].start((1, 2, 3), SamplingParams(max_tokens=6), pair, 60.0)
        world.settle(random.Random(seed))
        assert warm.ending == "finished"
        num_read, num_named = 0, decode.pool.num_named

        def damage(flying: deque[Flight]) -> None:
            nonlocal num_read
            if num_read == victim:
                DAMAGES[name](flying)
            num_read += 1

        prefill.plane.damage = damage
        other_pair = (world.nodes["P1"].party, decode.party)
        bystander = world.routers[0].start((5, 4, 3), SamplingParams(max_tokens=6), other_pair, 60.0)
        job = world.routers[0].start(PROMPT, SamplingParams(max_tokens=6), pair, 60.0)
        world.settle(random.Random(seed))
        world.check()
        assert bystander.ending == "finished"
        if job.ending != "finished":
            # One that was refused leaves a gap: then the deadline decides.
            for _ in range(31):
                world.advance(2.0)
                world.settle(random.Random(seed))
            assert job.ending is not None
            assert job.ending.startswith("failed")
            assert decode.pool.match(job.names()) == []
            assert decode.pool.num_named == num_named + 2, "the bystander's answer filled two blocks"
            assert decode.state.counters()["intakes_failed_total"] == 1
        else:
            assert name in ("swap_contents", "replace_whole"), "nothing else was in flight"
        prefill.plane.damage = lambda _flying: None
        again = world.routers[0].start(PROMPT, SamplingParams(max_tokens=6), pair, 60.0)
        world.settle(random.Random(seed))
        assert again.ending == "finished"
        world.drain(random.Random(seed))


@pytest.mark.parametrize("seed", range(15))
def test_damage_and_poison_never_reach_an_answer(seed: int) -> None:
    """The routers compare every token with the only right one the moment it comes."""
    rng = random.Random(seed)
    world = World(num_routers=1)
    for node in world.nodes.values():
        node.plane.damage = lambda flying: rng.choice(list(DAMAGES.values()))(flying) if rng.random() < 0.3 else None
    router = world.routers[0]
    for _ in range(40):
        prompt, sampling = random_request(rng)
        router.start(prompt, sampling, (rng.choice(world.parties("P")), rng.choice(world.parties("D"))), 20.0)
        for _ in range(rng.randint(0, 40)):
            world.run(rng, 1)
            world.check()
            world.poison()
        if rng.random() < 0.2 and router.open_jobs():
            router.cancel(rng.choice(router.open_jobs()))
        if rng.random() < 0.1:
            world.advance(rng.choice([0.5, 3.0, 21.0]))
    world.poison()
    world.settle(rng)
    world.poison()
    world.drain(rng)
    endings = [job.ending or "" for job in router.jobs.values()]
    assert "finished" in endings
    assert any(ending.startswith("failed") for ending in endings)
