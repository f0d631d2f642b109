"""A generator that replays a script instead of asking nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from cluster.request import FinishReason
from router.generation import Endings, Generation, Readiness, TokenDelta

Step = TokenDelta | Sequence[TokenDelta] | Exception | asyncio.Event


class FakeGenerator:
    """Each generation runs ``script``: deltas are yielded (alone or together), exceptions raised, events awaited.

    Deltas of choices that the reader has ended are left out.
    ``script_of`` holds scripts for prompts that begin with a certain token. ``num_open`` counts generations
    that run, ``num_finished`` those whose script was read to its end.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.script: Sequence[Step] = ()
        self.script_of: dict[int, Sequence[Step]] = {}
        self.seen: list[Generation] = []
        self.num_open = 0
        self.num_finished = 0
        self.opened = asyncio.Event()
        self.readiness = Readiness(True, "")
        self.max_tokens: int | None = None

    async def generate(
        self, generation: Generation, endings: Endings | None = None
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        ended: set[int] = set()
        self.seen.append(generation)
        self.num_open += 1
        self.opened.set()
        try:
            for step in self.script_of.get(generation.prompt_token_ids[0], self.script):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                together = [step] if isinstance(step, TokenDelta) else step
                if left := [delta for delta in together if delta.choice not in ended]:
                    yield left
                    ended.update(endings.take() if endings is not None else ())
            self.num_finished += 1
        finally:
            self.num_open -= 1

    def ready(self) -> Readiness:
        return self.readiness

    def max_request_tokens(self) -> int | None:
        return self.max_tokens

    def max_answer_tokens(self, prompt_len: int, num_choices: int) -> int | None:
        return None if self.max_tokens is None else (self.max_tokens - prompt_len) // num_choices


def deltas(
    token_ids: Sequence[int], finish: FinishReason | None = "length", *, per_delta: int = 1, cached: int = 0
) -> list[TokenDelta]:
    """The ids as deltas; the first carries ``cached_tokens``, the last the finish reason."""
    groups = [tuple(token_ids[start : start + per_delta]) for start in range(0, len(token_ids), per_delta)]
    return [
        TokenDelta(group, finish if index == len(groups) - 1 else None, cached if index == 0 else None)
        for index, group in enumerate(groups)
    ]
