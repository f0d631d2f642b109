"""The seam between the HTTP front and the dispatcher: one prompt in, token deltas out.

Everything above this file speaks OpenAI's JSON and text; everything below it speaks token ids and nodes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cluster.request import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt to continue, ``sampling.num_choices`` times.

    ``cache_salt`` separates prefix caches of clients that must not share them. ``num_prompt_logprobs`` (None: none)
    asks for the log-probability of every prompt token but the first, and of so many most likely ones at its place.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    num_prompt_logprobs: int | None = None


class TokenDelta(msgspec.Struct, frozen=True):  # made in a tenth of a frozen dataclass's time, one a token
    """New tokens of one choice of a generation, in order; ``finish_reason`` is set on its last delta only.

    Choices are numbered from 0; the first deltas of a generation are token 0 of each choice, in order. Where nothing is
    generated (``max_tokens`` 0) each choice has one delta without tokens.

    A stop token's id is the last of ``token_ids`` with finish reason ``stop``: it counts as a generated
    token, its text is not shown. ``cached_tokens``, the prompt tokens found in a prefix cache, comes with
    token 0 of choice 0, and so does ``prompt_logprobs``: one entry for each prompt token but the first, if they were
    asked for. ``logprobs`` has one entry a token if they were asked for, else none.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Endings:
    """What the reader of a generation tells its generator: choices it has ended by itself, by a stop string say."""

    def __init__(self) -> None:
        self._new: list[int] = []

    def add(self, choice: int) -> None:
        """Nothing more of ``choice`` will be read. To be said before the next deltas are asked for."""
        self._new.append(choice)

    def take(self) -> list[int]:
        """Those added since the last call."""
        new, self._new = self._new, []
        return new


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request sent now could be served; ``reason`` says in a few words why not."""

    ready: bool
    reason: str


class Generator(Protocol):
    """What the HTTP front asks of the rest of the router."""

    def generate(
        self, generation: Generation, endings: Endings | None = None
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        """Continue one prompt. Deltas that are there at the same time come together, in order.

        No later ones follow of a choice that the reader added to ``endings``.
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

    def max_answer_tokens(self, prompt_len: int, num_choices: int) -> int | None:
        """Largest output of each of several choices that any known decode node can hold; None if none is known."""
        ...
