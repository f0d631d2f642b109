"""Several choices through two real nodes: each is, to the bit, what one engine gives for that choice alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from real_pair import BLOCK_SIZE, NUM_BLOCKS, SEED, Answer, RealPair, real_pair, tiny_model

from cluster.prefix_hash import block_hashes
from cluster.request import RequestId, RequestKey, SamplingParams, finish_reason
from cluster.wire import Failed
from engine.history import TokenHistory
from engine.kv_cache import KVCache
from engine.runner import ModelRunner
from engine.step import SequenceChunk, StepPlan
from kernels.backend import Backend
from tests import backends

LENGTHS = [1, 3, 4, 5, 15, 16, 17, 31, 32, 33]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 11, "num_logprobs": 2},
    {"temperature": 1.3, "top_p": 0.9, "seed": -3, "choice": 4, "num_logprobs": 0},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
    {"temperature": 1.5, "seed": 2, "stop_token_ids": (1, 3, 5, 7, 9, 11), "num_logprobs": 1},
    {"temperature": 1.5, "seed": 2, "stop_token_ids": (1, 3, 5, 7, 9, 11), "min_tokens": 4},
    {"temperature": 1.0, "seed": 8, "max_tokens": 1, "num_logprobs": 1},
    {"temperature": 1.0, "seed": 8, "max_tokens": 2},
]


def native() -> Backend:
    """The kernels whose bits do not depend on chunks and batches."""
    return backends.make("native")


def prompt_of(length: int) -> list[int]:
    return [(i * i + length) % 20 for i in range(length)]


def alone(runner: ModelRunner, prompt: list[int], sampling: SamplingParams) -> Answer:
    """One engine that prefills and decodes one choice, knowing nothing of any other."""
    key, table, tokens = RequestKey(RequestId("oracle"), 0), list(range(20)), list(prompt)
    answer: Answer = []
    while True:
        start = len(tokens) - 1 if answer else 0
        history = TokenHistory.of_sequence(sampling, tokens, len(answer))
        chunk = SequenceChunk(key, tokens[start:], start, table, sampling, len(tokens), len(answer), history)
        (token,) = runner.execute(StepPlan((chunk,))).tokens
        tokens.append(token.token_id)
        answer.append((token.token_id, token.logprobs))
        if finish_reason(sampling, token.token_id, len(answer)) is not None:
            return answer


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])
async def test_every_choice_is_what_one_engine_gives_for_it_alone(scheme: str, tmp_path: Path) -> None:
    async with real_pair(tmp_path, scheme, backend=native) as pair:
        model = tiny_model(tmp_path, native())
        runner = ModelRunner(model, KVCache(model.kv_layout(BLOCK_SIZE), 20))
        for number, length in enumerate(LENGTHS):
            for options in OPTIONS[number % 2 :: 2]:
                sampling = SamplingParams(**{"max_tokens": 9, "num_choices": 3, **options})
                got = await pair.ask_choices(prompt_of(length), sampling)
                assert got == {each.choice: alone(runner, prompt_of(length), each) for each in sampling.choices()}


async def test_choice_j_of_four_is_choice_j_asked_for_alone(tmp_path: Path) -> None:
    async with real_pair(tmp_path, "tcp", backend=native) as pair:
        sampling = SamplingParams(max_tokens=9, num_choices=4, temperature=1.0, seed=6, num_logprobs=2)
        together = await pair.ask_choices(prompt_of(17), sampling)
        assert not isinstance(together, Failed)
        assert len({tuple(token_id for token_id, _ in answer) for answer in together.values()}) == 4
        for each in sampling.choices():
            assert await pair.ask_choices(prompt_of(17), each) == {each.choice: together[each.choice]}


async def test_batch_mates_do_not_show(tmp_path: Path) -> None:
    async with real_pair(tmp_path, "tcp", backend=native) as pair:
        sampling = SamplingParams(max_tokens=12, num_choices=3, temperature=1.0, seed=6)
        quiet = await pair.ask_choices(prompt_of(10), sampling)
        others = [pair.ask_choices(prompt_of(n), SamplingParams(max_tokens=20, num_choices=2)) for n in (7, 12)]
        crowded, *_rest = await asyncio.gather(pair.ask_choices(prompt_of(10), sampling), *others)
        assert crowded == quiet


async def test_what_a_choice_generated_is_found_again(tmp_path: Path) -> None:
    """The longest answer's blocks are a prefix of the next turn."""
    async with real_pair(tmp_path, "tcp", backend=native) as pair:
        sampling = SamplingParams(max_tokens=11, num_choices=2, temperature=1.0, seed=1)
        answers = await _answers(pair, prompt_of(6), sampling)
        await pair.at_rest()
        for token_ids in answers.values():
            stored = prompt_of(6) + token_ids[:-1]
            names = block_hashes(SEED, stored, BLOCK_SIZE)
            assert len(pair.decode.pool.match(names)) == len(names) == 4
            alone = SamplingParams(max_tokens=3)
            again = await _answers(pair, [*stored, 3], alone)
        assert again == await _answers(pair, [*stored, 3], msgspec.structs.replace(alone, seed=9))


async def _answers(pair: RealPair, prompt: list[int], sampling: SamplingParams) -> dict[int, list[int]]:
    found = await pair.ask_choices(prompt, sampling)
    assert not isinstance(found, Failed)
    return {choice: [token_id for token_id, _logprobs in answer] for choice, answer in found.items()}


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])
async def test_requests_cancelled_and_cut_at_any_moment_leave_nothing(scheme: str, tmp_path: Path) -> None:
    """The pair checks at its end that both pools are as at the start."""
    rng = random.Random(3)
    async with real_pair(tmp_path, scheme, backend=native) as pair:
        for number in range(60):
            sampling = SamplingParams(max_tokens=rng.randint(1, 14), num_choices=rng.randint(1, 3), seed=number)
            cut = [rng.randrange(3) for _ in range(rng.randint(0, 2))]
            await pair.abandon(prompt_of(rng.randint(1, 33)), sampling, after=rng.randint(0, 6), cut=cut)
            if number % 8 == 7:
                await pair.at_rest()
                assert pair.decode.pool.num_free == pair.prefill.pool.num_free == NUM_BLOCKS
        alone = SamplingParams(max_tokens=3)
        assert len((await _answers(pair, prompt_of(9), alone))[0]) == 3
