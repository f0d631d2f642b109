"""The oracle of the split: the router's own front over one engine that prefills and decodes in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from itertools import count
from pathlib import Path

from fastapi import FastAPI

from cluster.config import cache_dir
from cluster.model_store import read_config
from cluster.request import RequestId, RequestKey, SamplingParams, TokenLogprobs, finish_reason
from engine.grammar import Grammars
from engine.history import TokenHistory
from engine.kv_cache import KVCache
from engine.model import LlamaModel
from engine.model_config import ModelConfig
from engine.runner import ModelRunner
from engine.step import SampledToken, SequenceChunk, StepPlan
from engine.weights import load_weights
from kernels.backend import select
from router.app import FrontSettings, create_app
from router.generation import Endings, Generation, Readiness, TokenDelta
from router.metrics import Metrics
from router.tokenizer import Tokenizer


class OneProcess:
    """A `router.generation.Generator`: each choice by itself, from its prompt's first token on, nothing shared."""

    def __init__(self, directory: Path, block_size: int, max_len: int) -> None:
        config, facts = ModelConfig.from_directory(directory), read_config(directory)
        ops = select("cpu", "auto", cache_dir=cache_dir() / "kernels", threads=1)
        model = LlamaModel(config, load_weights(directory, config, ops))
        grammars = Grammars(directory / "tokenizer.json", config.vocab_size, facts.eos_token_ids)
        cache = KVCache(model.kv_layout(block_size), -(-max_len // block_size))
        self._runner = ModelRunner(model, cache, grammars)
        self._table = list(range(cache.num_blocks))
        self._block_size = block_size
        self._numbers = count()
        self._seen: set[tuple[int, ...]] = set()

    async def generate(
        self, generation: Generation, endings: Endings | None = None
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        """Token 0 of every choice, then choice after choice."""
        cached = self._cached_tokens(generation)
        scores: list[TokenLogprobs] = []
        if generation.sampling.prefill_only:
            self._execute(generation, None, [], scores)
            for choice in range(generation.sampling.num_choices):
                first = choice == 0
                yield [TokenDelta((), "length", cached if first else None, (), choice, tuple(scores) if first else ())]
            return
        first_tokens = [self._continue(generation, sampling, [], scores) for sampling in generation.sampling.choices()]
        for choice, (token, sampling) in enumerate(zip(first_tokens, generation.sampling.choices(), strict=True)):
            delta = TokenDelta(
                (token.token_id,),
                finish_reason(sampling, token.token_id, 1),
                cached if choice == 0 else None,
                () if token.logprobs is None else (token.logprobs,),
                choice,
                tuple(scores) if choice == 0 else (),
            )
            yield [delta]
        dropped = set(endings.take()) if endings is not None else set()
        for choice, sampling in enumerate(generation.sampling.choices()):
            output = [first_tokens[choice].token_id]
            while choice not in dropped and finish_reason(sampling, output[-1], len(output)) is None:
                token = self._continue(generation, sampling, output, [])
                output.append(token.token_id)
                logprobs = () if token.logprobs is None else (token.logprobs,)
                finish = finish_reason(sampling, token.token_id, len(output))
                yield [TokenDelta((token.token_id,), finish, None, logprobs, choice)]
                dropped |= set(endings.take()) if endings is not None else set()

    def ready(self) -> Readiness:
        return Readiness(True, "")

    def max_request_tokens(self) -> int | None:
        return len(self._table) * self._block_size

    def max_answer_tokens(self, prompt_len: int, num_choices: int) -> int | None:
        return None

    def _cached_tokens(self, generation: Generation) -> int:
        """What a prefix cache would have held: whole blocks of prompts seen before, never the last token."""
        prompt, size = generation.prompt_token_ids, self._block_size
        ends = range(size, len(prompt) + 1, size)
        hits = 0
        if generation.num_prompt_logprobs is None:
            for end in ends:
                if end >= len(prompt) or prompt[:end] not in self._seen:
                    break
                hits = end
        self._seen |= {prompt[:end] for end in ends}
        return hits

    def _continue(
        self, generation: Generation, sampling: SamplingParams, output: list[int], scores: list[TokenLogprobs]
    ) -> SampledToken:
        """The token after prompt and ``output``, computed anew from the first token: no state is kept at all."""
        return self._execute(generation, sampling, output, scores)[0]

    def _execute(
        self, generation: Generation, sampling: SamplingParams | None, output: list[int], scores: list[TokenLogprobs]
    ) -> tuple[SampledToken, ...]:
        text = (*generation.prompt_token_ids, *output)
        scored = generation.num_prompt_logprobs
        chunk = SequenceChunk(
            key=RequestKey(RequestId(f"r{next(self._numbers)}"), 0),
            token_ids=text,
            start=0,
            block_table=self._table,
            sampling=sampling,
            position=len(text),
            num_generated=len(output),
            history=None if sampling is None else TokenHistory.of_sequence(sampling, text, len(output)),
            output_token_ids=tuple(output),
            targets=() if scored is None or output else text[1:],
            num_target_logprobs=scored or 0,
        )
        result = self._runner.execute(StepPlan((chunk,)))
        if result.failed:
            raise AssertionError(result.failed[0].message)
        if result.scored and not scores:
            scores.extend(result.scored[0].logprobs)
        return result.tokens


def one_process_app(directory: Path, served_name: str, block_size: int, max_len: int) -> FastAPI:
    """The HTTP front over it."""
    facts = read_config(directory)
    tokenizer = Tokenizer.from_directory(directory, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)
    settings = FrontSettings(served_name=served_name, max_model_len=facts.max_model_len, version="oracle")
    return create_app(settings, tokenizer, OneProcess(directory, block_size, max_len), Metrics())
