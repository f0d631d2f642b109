"""A prefill and a decode node together, through the real protocol, over a fake link."""

from __future__ import annotations

import random

import pytest
from fake_node import BLOCK_SIZE, MAX_MODEL_LEN, VOCABULARY
from fake_router import Job
from world import World

from cluster.request import SamplingParams
from cluster.wire import Acknowledged, Commit, Message


def random_request(rng: random.Random) -> tuple[tuple[int, ...], SamplingParams]:
    """Prompts of a few families, so that prefixes repeat."""
    family = random.Random(rng.randrange(4))
    base = [family.randrange(VOCABULARY) for _ in range(MAX_MODEL_LEN)]
    prompt = tuple(base[: rng.randint(1, 20)]) + tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3)))
    stops = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 2])))
    num_choices = rng.choice([1, 1, 1, 2, 3])
    return prompt, SamplingParams(
        max_tokens=rng.randint(1, 12 // num_choices),
        num_choices=num_choices,
        seed=rng.randrange(5),
        stop_token_ids=stops,
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        num_logprobs=rng.choice([None, 1]),
    )


def run_one(world: World, prompt: tuple[int, ...], max_tokens: int) -> Job:
    pair = (world.nodes["P0"].party, world.nodes["D0"].party)
    job = world.routers[0].start(prompt, SamplingParams(max_tokens=max_tokens), pair, 60.0)
    world.settle(random.Random(1))
    assert job.ending == "finished"
    return job


def test_two_hundred_random_requests_all_end_right() -> None:
    rng = random.Random(7)
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    router = world.routers[0]
    waiting = [random_request(rng) for _ in range(200)]
    for _ in range(20_000):
        if not waiting and not router.open_jobs():
            break
        if waiting and len(router.open_jobs()) < 5:
            prompt, sampling = waiting.pop()
            job = router.start(prompt, sampling, (world.nodes["P0"].party, world.nodes["D0"].party), 1e6)
        world.run(rng, 10)
        world.check()
        for job in list(router.jobs.values()):
            if job.ending is not None and job.ending.startswith("refused"):
                assert "slots" in job.ending or "free" in job.ending
                waiting.append((job.prompt, job.sampling))
                job.ending = "again"
    endings = [job.ending for job in router.jobs.values()]
    assert endings.count("finished") == 200
    assert set(endings) <= {"finished", "again"}
    world.drain(rng)
    assert world.nodes["P0"].state.counters()["handoffs_failed_total"] == 0
    assert world.nodes["D0"].state.counters()["intakes_failed_total"] == 0


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_a_second_identical_prompt_sends_only_the_missing_suffix(prompt_len: int) -> None:
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    prompt = tuple(i % VOCABULARY for i in range(prompt_len))
    num_full, num_blocks = prompt_len // BLOCK_SIZE, -(-prompt_len // BLOCK_SIZE)
    first = run_one(world, prompt, 5)
    assert first.granted is not None
    assert first.granted.ticket.num_blocks == num_blocks
    counters = world.nodes["D0"].state.counters()
    assert counters["prompt_blocks_shared_total"] == 0
    second = run_one(world, prompt, 5)
    assert second.granted is not None
    assert second.granted.ticket.num_blocks == num_blocks - num_full
    assert second.granted.ticket.first_missing_token == num_full * BLOCK_SIZE
    assert second.cached_tokens == (prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.token_ids == first.token_ids
    counters = world.nodes["D0"].state.counters()
    assert counters["prompt_blocks_shared_total"] == num_full
    assert counters["prompt_blocks_received_total"] == 2 * num_blocks - num_full
    world.drain(random.Random(2))


def test_the_answer_is_a_prefix_of_the_next_turn() -> None:
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    first = run_one(world, (1, 2, 3, 4, 5), 8)
    # The last token is never stored, so 5 + 7 tokens are in blocks: three full ones.
    second = run_one(world, (*first.prompt, *first.token_ids, 6), 2)
    assert second.granted is not None
    assert second.granted.ticket.first_missing_token == 12
    world.drain(random.Random(2))


def test_the_same_prompt_twice_at_once() -> None:
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    pair = (world.nodes["P0"].party, world.nodes["D0"].party)
    prompt = tuple(i % VOCABULARY for i in range(8))
    jobs = [world.routers[0].start(prompt, SamplingParams(max_tokens=6), pair, 60.0) for _ in range(2)]
    world.settle(random.Random(3))
    assert [job.ending for job in jobs] == ["finished", "finished"]
    assert jobs[0].token_ids == jobs[1].token_ids
    world.drain(random.Random(3))


@pytest.mark.parametrize("lost", [Commit, Acknowledged])
def test_the_last_word_of_a_handoff_may_be_lost(lost: type[Message]) -> None:
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    pair = (world.nodes["P0"].party, world.nodes["D0"].party)
    job = world.routers[0].start((1, 2, 3, 4, 5), SamplingParams(max_tokens=4), pair, 60.0)
    rng, num_lost = random.Random(4), 0
    for _ in range(2_000):
        if not (moves := world.moves()):
            break
        for queue in world.channels.values():
            if queue and isinstance(queue[0], lost) and num_lost < 2:
                queue.popleft()
                num_lost += 1
                break
        else:
            rng.choice(moves)()
        if num_lost == 1 and lost is Acknowledged:
            world.advance(1.0)  # said again while the decode node still decodes
    for _ in range(3):
        world.advance(1.0)
        world.settle(rng)
    assert num_lost
    assert job.ending == "finished"
    assert len(job.token_ids) == 4
    world.drain(rng)
    assert world.nodes["D0"].state.counters()["intakes_failed_total"] == 0


@pytest.mark.parametrize("max_tokens", range(1, 10))
@pytest.mark.parametrize("prompt_len", [4, 5, 8])
def test_every_length_limit_is_kept(prompt_len: int, max_tokens: int) -> None:
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    job = run_one(world, tuple(range(prompt_len)), max_tokens)
    assert len(job.token_ids) == max_tokens
    computed = world.nodes["D0"].state.counters()["decode_computed_tokens_total"]
    assert computed == max_tokens - 1, "the decode node computed what the prefill node had"
    world.drain(random.Random(4))


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5, "repetition_penalty": 0.9}],
    ids=str,
)
@pytest.mark.parametrize("prompt_len", [1, 4, 7, 9])
def test_penalties_know_what_one_node_would_know(prompt_len: int, options: dict[str, float]) -> None:
    """The router of the simulation compares every token with one that depends on the counts at its place."""
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    pair = (world.nodes["P0"].party, world.nodes["D0"].party)
    for seed in range(5):
        sampling = SamplingParams(max_tokens=12, seed=seed, num_logprobs=0, **options)  # type: ignore[arg-type]
        job = world.routers[0].start(tuple(range(prompt_len)), sampling, pair, 60.0)
        world.settle(random.Random(seed))
        assert job.ending == "finished"
        assert len(job.token_ids) == 12
    world.drain(random.Random(5))


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("num_choices", [2, 3, 4])
def test_several_choices_cost_one_prefill_and_one_transfer(prompt_len: int, num_choices: int) -> None:
    """The router of the simulation compares each with what the same choice is alone."""
    world = World(num_prefill=1, num_decode=1, num_routers=1)
    pair = (world.nodes["P0"].party, world.nodes["D0"].party)
    sampling = SamplingParams(max_tokens=5, seed=3, num_choices=num_choices, repetition_penalty=1.2)
    job = world.routers[0].start(tuple(range(prompt_len)), sampling, pair, 60.0)
    world.settle(random.Random(6))
    assert job.ending == "finished"
    assert [len(answer) for answer in job.answers.values()] == [5] * num_choices
    prefill, decode = (world.nodes[name].state.counters() for name in ("P0", "D0"))
    assert prefill["prefill_computed_tokens_total"] == prompt_len
    assert decode["prompt_blocks_received_total"] == -(-prompt_len // BLOCK_SIZE)
    assert decode["decode_computed_tokens_total"] == 4 * num_choices
    world.drain(random.Random(6))


@pytest.mark.parametrize("seed", range(30))
def test_chaos_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    for _ in range(25):
        router = rng.choice(world.routers)
        prompt, sampling = random_request(rng)
        if world.parties("P") and world.parties("D"):
            pair = (rng.choice(world.parties("P")), rng.choice(world.parties("D")))
            router.start(prompt, sampling, pair, rng.choice([1.0, 20.0, 60.0]))
        for _ in range(rng.randint(0, 6)):
            world.run(rng, rng.randint(1, 6))
            world.check()
        if rng.random() < 0.2 and router.open_jobs():
            router.cancel(rng.choice(router.open_jobs()))
        if rng.random() < 0.3 and (granted := [job for job in router.open_jobs() if job.granted]):
            job = rng.choice(granted)
            router.drop(job, rng.choice(sorted(job.waiting)))
        if rng.random() < 0.15 and world.wires():
            rng.choice(world.wires()).cut("the cable was pulled")
        if rng.random() < 0.1:
            world.advance(rng.choice([0.5, 3.0, 11.0]), rng.choice([None, *world.routers]))
        if rng.random() < 0.07:
            name = rng.choice(list(world.nodes))
            world.kill(name)
            world.start_node(name)
        world.check()
    world.drain(rng)
