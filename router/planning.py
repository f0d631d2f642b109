"""From a decoded request to what will be generated: tokenised, checked against the model and the nodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from cluster.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from cluster.request import SamplingParams
from router.generation import Generation, Generator
from router.schemas import ChatRequest, CompletionRequest, RequestFields
from router.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS: Final = 16
# Below this a temperature divides logits into infinities; it means greedy, as in vLLM.
_MIN_TEMPERATURE: Final = 1e-5

UsageReport = Literal["none", "last", "every"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, ready to run. With ``n`` choices each, ``generations[i]`` gives choices ``i * n`` and on."""

    endpoint: Literal["completions", "chat"]
    generations: tuple[Generation, ...]
    stops: tuple[str, ...]
    stream: bool
    usage: UsageReport
    return_token_ids: bool


class Planner:
    """Holds what planning needs to know of the model and the nodes."""

    def __init__(self, served_name: str, max_model_len: int, tokenizer: Tokenizer, generator: Generator) -> None:
        self._served_name = served_name
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._generator = generator

    async def completion(self, request: CompletionRequest) -> Plan:
        """Plan a text completion. Raises :class:`InvalidRequestError` and :class:`ModelNotFoundError`."""
        self.check_model(request.model)
        limit = self._limit()
        generations = []
        for prompt in request.prompts():
            if isinstance(prompt, str):
                token_ids = await self._tokenizer.encode_prompt(prompt, max_tokens=limit)
            else:
                token_ids = prompt
            shared = self._limit_of_each(limit, len(token_ids), request.num_choices())
            room = _room(len(token_ids), request.max_tokens, shared, "prompt")
            self._check_vocabulary(token_ids, "prompt")
            max_tokens = min(DEFAULT_COMPLETION_TOKENS, room) if request.max_tokens is None else request.max_tokens
            generations.append(self._generation(request, token_ids, max_tokens))
        return _plan("completions", request, generations)

    async def chat(self, request: ChatRequest) -> Plan:
        """Plan an answer to a conversation. Raises as :meth:`completion` does."""
        self.check_model(request.model)
        limit = self._limit()
        token_ids = await self._tokenizer.encode_chat(request.conversation(), max_tokens=limit)
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        shared = self._limit_of_each(limit, len(token_ids), request.num_choices())
        room = _room(len(token_ids), wanted, shared, "messages")
        return _plan("chat", request, [self._generation(request, token_ids, room if wanted is None else wanted)])

    def check_model(self, model: str | None) -> None:
        """No name and an empty one mean the model we serve. Raises :class:`ModelNotFoundError` for another."""
        if model and model != self._served_name:
            raise ModelNotFoundError(
                "The requested model does not exist; GET /v1/models lists what does.", param="model"
            )

    def _limit(self) -> int:
        """Prompt plus output that the model's positions and some node's KV pool can hold."""
        pool = self._generator.max_request_tokens()
        return self._max_model_len if pool is None else min(pool, self._max_model_len)

    def _limit_of_each(self, limit: int, prompt_len: int, num_choices: int) -> int:
        """Prompt plus output of each of several choices: they share the prompt's blocks and a node's pool."""
        if num_choices == 1:
            return limit
        room = self._generator.max_answer_tokens(prompt_len, num_choices)
        return limit if room is None else min(limit, prompt_len + room)

    def _check_vocabulary(self, token_ids: Sequence[int], field: str) -> None:
        if any(token_id >= self._tokenizer.vocab_size for token_id in token_ids):
            text = f"`{field}` holds a token id outside the vocabulary of {self._tokenizer.vocab_size}."
            raise InvalidRequestError(text, param=field)

    def _generation(self, request: RequestFields, token_ids: tuple[int, ...], max_tokens: int) -> Generation:
        if not token_ids:
            raise InvalidRequestError("`prompt` must not be empty.", param="prompt")
        temperature = 1.0 if request.temperature is None else request.temperature
        stop_ids = request.stop_token_ids or ()
        self._check_vocabulary(stop_ids, "stop_token_ids")
        eos_ids = () if request.ignore_eos else self._tokenizer.eos_token_ids
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=random.getrandbits(63) if request.seed is None else request.seed,
            num_choices=request.num_choices(),
            stop_token_ids=tuple(dict.fromkeys((*eos_ids, *stop_ids))),
        )
        return Generation(token_ids, sampling, request.cache_salt or "")


def for_tenant(plan: Plan, salt: str | None) -> Plan:
    """The plan with prefix caches of that holder of a key only; unchanged where there are no keys (None)."""
    if salt is None:
        return plan
    # Length first, so that no two pairs of salts make the same text.
    generations = tuple(
        replace(generation, cache_salt=f"{len(salt)}:{salt}{generation.cache_salt}") for generation in plan.generations
    )
    return replace(plan, generations=generations)


def _room(prompt_len: int, wanted: int | None, limit: int, field: str) -> int:
    """Tokens that can follow the prompt. Raises :class:`ContextLengthError` if ``wanted`` (or one) cannot."""
    room = limit - prompt_len
    if room >= (1 if wanted is None else wanted):
        return room
    asked = "at least 1" if wanted is None else str(wanted)
    # Clients tell an overflow by these words, not by the code: both phrases must stay.
    raise ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt_len + (wanted or 1)} tokens ({prompt_len} in the {field}, {asked} in the completion). "
        f"Please reduce the length of the {field} or completion. (context_length_exceeded)",
        param=field,
    )


def _plan(endpoint: Literal["completions", "chat"], request: RequestFields, generations: Sequence[Generation]) -> Plan:
    options = request.stream_options
    usage: UsageReport = "none"
    if options is not None and options.include_usage:
        usage = "every" if options.continuous_usage_stats else "last"
    return Plan(
        endpoint=endpoint,
        generations=tuple(generations),
        stops=request.stops(),
        stream=bool(request.stream),
        usage=usage,
        return_token_ids=bool(request.return_token_ids),
    )
