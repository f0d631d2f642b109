"""A prefill and a decode node whose blocks hold another number of tokens: same answers, only the suffix is sent."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from damages import LINK_FAULTS
from fake_node import VOCABULARY
from test_pair_simulation import random_request
from world import World

from cluster.request import SamplingParams

SIZES = [(4, 8), (8, 4), (3, 4), (4, 3), (5, 2), (1, 7), (7, 1)]


@pytest.mark.parametrize(("ours", "theirs"), SIZES)
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 7, 8, 9, 16, 17, 21])
def test_only_the_suffix_that_the_decode_node_lacks_is_sent(ours: int, theirs: int, prompt_len: int) -> None:
    world = World(1, 1, 1, block_sizes={"P0": ours, "D0": theirs})
    prefill, decode = world.nodes["P0"], world.nodes["D0"]
    prompt = tuple(i * i % VOCABULARY for i in range(prompt_len))
    jobs = []
    for number in range(3):
        job = world.routers[0].start(prompt, SamplingParams(max_tokens=5), (prefill.party, decode.party), 60.0)
        world.settle(random.Random(number))
        assert job.ending == "finished"  # and the router has compared every token
        jobs.append(job)
    num_full = prompt_len // theirs
    tickets = [job.granted.ticket for job in jobs if job.granted is not None]
    assert [ticket.first_missing_token for ticket in tickets] == [0, num_full * theirs, num_full * theirs]
    assert [ticket.num_blocks for ticket in tickets] == [-(-prompt_len // theirs)] + [
        -(-prompt_len // theirs) - num_full
    ] * 2
    assert [job.cached_tokens for job in jobs] == [0] + [(prompt_len - 1) // ours * ours] * 2
    assert decode.state.counters()["prompt_blocks_received_total"] == sum(ticket.num_blocks for ticket in tickets)
    assert prefill.plane.sends.blocks_sent == sum(ticket.num_blocks for ticket in tickets)
    world.drain(random.Random(1))


@pytest.mark.parametrize("seed", range(20))
def test_chaos_between_nodes_of_four_sizes_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    world = World(block_sizes={name: rng.choice([2, 3, 4, 5, 8]) for name in ("P0", "P1", "D0", "D1")})
    for _ in range(25):
        router = rng.choice(world.routers)
        prompt, sampling = random_request(rng)
        pair = (rng.choice(world.parties("P")), rng.choice(world.parties("D")))
        router.start(prompt, sampling, pair, rng.choice([1.0, 20.0, 60.0]))
        for _ in range(rng.randint(0, 30)):
            world.run(rng, 1)
            world.check()
            world.poison()
        if rng.random() < 0.2 and router.open_jobs():
            router.cancel(rng.choice(router.open_jobs()))
        if rng.random() < 0.15 and world.wires():
            rng.choice(world.wires()).cut("the cable was pulled")
        flying = [wire.flying for wire in world.wires() if wire.flying]
        if rng.random() < 0.2 and flying:
            rng.choice(list(LINK_FAULTS.values()))(rng.choice(flying))
        if rng.random() < 0.1 and (pairs := world.losable()):
            world.channels[rng.choice(pairs)].popleft()
        if rng.random() < 0.1:
            world.advance(rng.choice([0.5, 3.0, 11.0]), rng.choice([None, *world.routers]))
        if rng.random() < 0.07:
            name = rng.choice(list(world.nodes))
            world.kill(name)
            world.start_node(name)
    world.drain(rng)
    assert any(job.ending == "finished" for router in world.routers for job in router.jobs.values())


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])
@pytest.mark.parametrize("block_sizes", [(4, 8), (8, 4), (4, 12), (3, 4), (16, 5)], ids=str)
async def test_real_pairs_answer_as_pairs_of_one_size(
    block_sizes: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    """Real model, memory and transport, every byte checked; cold, then with both prefix caches."""
    pytest.importorskip("torch")
    from real_pair import real_pair

    prompts = [[(i * i + k) % 20 for i in range(1 + 5 * k)] for k in range(8)]
    async with real_pair(tmp_path, scheme) as same:
        right = [await same.ask(prompt, 9) for prompt in prompts]
    async with real_pair(tmp_path, scheme, "full", block_sizes=block_sizes) as pair:
        for _ in range(3):
            for some in (slice(0, 5), slice(5, 8)):  # what the pool holds at once
                assert await asyncio.gather(*(pair.ask(prompt, 9) for prompt in prompts[some])) == right[some]
        await pair.at_rest()
        shared = pair.decode.state.counters()["prompt_blocks_shared_total"]
        assert shared >= 2 * sum(len(prompt) // block_sizes[1] for prompt in prompts)
        assert pair.prefill.state.counters()["prefix_cached_tokens_total"] > 0


@pytest.mark.parametrize("block_sizes", [(4, 8), (8, 4), (3, 4), (16, 5)], ids=str)
async def test_choices_fork_in_blocks_of_the_decode_nodes_size(block_sizes: tuple[int, int], tmp_path: Path) -> None:
    """The prompt ends before, at and after block boundaries of both; penalties and log-probabilities go along."""
    pytest.importorskip("torch")
    from real_pair import real_pair
    from test_real_choices import native

    def sampling(length: int) -> SamplingParams:
        penalty = 0.5 if length % 2 else 0.0
        return SamplingParams(
            max_tokens=9, num_choices=3, temperature=1.0, seed=length, frequency_penalty=penalty, num_logprobs=1
        )

    prompts = [[(i * i + length) % 20 for i in range(length)] for length in (1, 3, 4, 5, 8, 15, 16, 17)]
    async with real_pair(tmp_path, "tcp", backend=native) as same:
        right = [await same.ask_choices(prompt, sampling(len(prompt))) for prompt in prompts]
    async with real_pair(tmp_path, "tcp", "full", backend=native, block_sizes=block_sizes) as pair:
        for _ in range(2):
            assert [await pair.ask_choices(prompt, sampling(len(prompt))) for prompt in prompts] == right
