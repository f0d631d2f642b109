"""From a request's options to what the nodes sample with: defaults, and every token id inside the vocabulary."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Final, TypeVar

from cluster.errors import InvalidRequestError
from cluster.request import Grammar, SamplingParams
from router.schemas import RequestFields
from router.tokenizer import Tokenizer

# Below this a temperature divides logits into infinities; it means greedy, as in vLLM.
_MIN_TEMPERATURE: Final = 1e-5
_Number = TypeVar("_Number", int, float)
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def sampling_params(
    request: RequestFields,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """The options of one generation of at most ``max_tokens``. Raises :class:`InvalidRequestError`."""
    temperature = _or(request.temperature, 1.0)
    min_tokens = _or(request.min_tokens, 0)
    if min_tokens > max_tokens:
        raise InvalidRequestError(f"`min_tokens` must not be over `max_tokens`, {max_tokens}.", param="min_tokens")
    eos_ids = () if request.ignore_eos else tokenizer.eos_token_ids
    stop_ids = in_vocabulary(request.stop_token_ids or (), tokenizer.vocab_size, "stop_token_ids")
    allowed = request.allowed_token_ids
    bad_words = tokenizer.encode_words(request.bad_words or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
        top_k=max(0, _or(request.top_k, 0)),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        seed=random.getrandbits(63) if request.seed is None else request.seed,
        num_choices=request.num_choices(),
        stop_token_ids=tuple(dict.fromkeys((*eos_ids, *stop_ids))),
        min_tokens=min_tokens,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, tokenizer.vocab_size),
        allowed_token_ids=None
        if allowed is None
        else in_vocabulary(allowed, tokenizer.vocab_size, "allowed_token_ids"),
        banned_token_ids=tuple(word[0] for word in bad_words if len(word) == 1),
        bad_words=tuple(word for word in bad_words if len(word) > 1),
        num_logprobs=num_logprobs,
        grammar=grammar,
    )


def in_vocabulary(token_ids: Iterable[int], vocab_size: int, field: str) -> tuple[int, ...]:
    """The ids, each once, in order. Raises :class:`InvalidRequestError` for one outside ``[0, vocab_size)``."""
    found = tuple(dict.fromkeys(token_ids))
    if found and max(found) >= vocab_size:
        raise InvalidRequestError(f"`{field}` holds a token id outside the vocabulary of {vocab_size}.", param=field)
    return found


def _logit_bias(request: RequestFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            text = f"The keys of `logit_bias` must be token ids below {vocab_size}."
            raise InvalidRequestError(text, param="logit_bias")
        biases[int(key)] = bias
    return tuple(biases.items())


def _or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
