"""The seam between the HTTP front and the dispatcher: one prompt in, token deltas out.

Everything above this file speaks OpenAI's JSON and text; everything below it speaks token ids and nodes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from cluster.request import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt to continue. ``cache_salt`` separates prefix caches of clients that must not share them.

    ``num_prompt_logprobs`` (None: none) asks for the log-probability of every prompt token but the first, and of so
    many most likely ones at its place.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one generation, in order; ``finish_reason`` is set on the last delta only.

    A stop token's id is the last of ``token_ids`` with finish reason ``stop``: it counts as a generated
    token, its text is not shown. ``cached_tokens``, the prompt tokens found in a prefix cache, comes with
    token 0, and so does ``prompt_logprobs``: one entry for each prompt token but the first, if they were asked for.
    ``logprobs`` has one entry a token if they were asked for, else none.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request sent now could be served; ``reason`` says in a few words why not."""

    ready: bool
    reason: str


class Generator(Protocol):
    """What the HTTP front asks of the rest of the router."""

    def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        """Continue one prompt.

        The iterator raises a :class:`~cluster.errors.BatonError` if the request fails. Closing it (``aclose``)
        or cancelling the task that reads it ends the request on every node that holds a part of it.
        """
        ...

    def ready(self) -> Readiness:
        """Whether at least one usable pair of nodes is alive; never waits."""
        ...

    def max_request_tokens(self) -> int | None:
        """Largest prompt plus output that any known decode node can hold; None if none is known."""
        ...
