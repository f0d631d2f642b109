"""One choice of one answer: token deltas in, shown text out, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.request import FinishReason
from router.completion import Piece
from router.detokenizer import Detokenizer
from router.generation import TokenDelta
from router.stop import StopMatcher


class Choice:
    """Follows one generation. After a piece with a finish reason it takes no more deltas.

    ``num_tokens`` counts what was generated up to the end of the shown text: tokens that follow a stop string
    in the same delta are not counted, a stop token and the tokens of the stop string are.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], eos_token_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._eos_token_ids = frozenset(eos_token_ids)
        self.num_tokens = 0
        self.cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None

    def feed(self, delta: TokenDelta) -> Piece:
        """The text that these tokens complete; empty while a character or a possible stop string is open."""
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        shown: list[str] = []
        for position, token_id in enumerate(delta.token_ids, start=1):
            self.num_tokens += 1
            if delta.finish_reason == "stop" and position == len(delta.token_ids):
                break  # a stop token counts and is not shown
            text, stopped = self._matcher.feed(self._detokenizer.feed(token_id))
            shown.append(text)
            if stopped:
                return self._finish(shown, delta.token_ids[:position], "stop", self._matcher.matched)
        if delta.finish_reason is None:
            return Piece("".join(shown), delta.token_ids)
        text, stopped = self._matcher.feed(self._detokenizer.flush())
        shown.append(text)
        if stopped:
            return self._finish(shown, delta.token_ids, "stop", self._matcher.matched)
        shown.append(self._matcher.flush())
        last = delta.token_ids[-1] if delta.token_ids and delta.finish_reason == "stop" else None
        stop_reason = None if last in self._eos_token_ids else last
        return self._finish(shown, delta.token_ids, delta.finish_reason, stop_reason)

    def _finish(
        self, shown: list[str], token_ids: tuple[int, ...], reason: FinishReason, stop_reason: str | int | None
    ) -> Piece:
        self.finish_reason = reason
        return Piece("".join(shown), token_ids, reason, stop_reason)
