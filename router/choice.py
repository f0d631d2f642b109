"""One choice of one answer: token deltas in, shown text out, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.request import FinishReason
from router.completion import Piece
from router.detokenizer import Detokenizer
from router.generation import TokenDelta
from router.logprobs import TokenEntry
from router.stop import StopMatcher
from router.tool_calls import CallReader
from router.tool_formats import CallRules


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a request wants its text: where it ends, and what of an ending is shown.

    A stop string counts from ``min_tokens`` generated tokens on. ``show_stop`` shows the stop string or the stop
    token that ended the text; special tokens have a text only with ``show_special``. With ``calls``, those are taken
    out of the shown text, wherever that ends.
    """

    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    show_stop: bool = False
    show_special: bool = False
    calls: CallRules | None = None


class Choice:
    """Follows one generation. After a piece with a finish reason it takes no more deltas.

    ``num_tokens`` counts what was generated up to the end of the shown text: tokens that follow a stop string
    in the same delta are not counted, a stop token and the tokens of the stop string are.
    """

    def __init__(self, detokenizer: Detokenizer, rules: TextRules, eos_token_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(rules.stops, shown=rules.show_stop)
        self._rules = rules
        self._reader = None if rules.calls is None else CallReader(rules.calls)
        self._shows_all = not rules.stops and rules.calls is None
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_chars = 0
        self.num_tokens = 0
        self.cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None

    def feed_plain(self, deltas: Sequence[TokenDelta]) -> list[str]:
        """The texts of as many leading deltas as bring text and nothing else, one for each: as a rule all but the last.

        They are taken; :meth:`feed_all` goes on with the rest.
        """
        texts: list[str] = []
        if not self._shows_all:
            return texts
        feed = self._detokenizer.feed
        for delta in deltas:
            if delta.finish_reason is not None or delta.logprobs:
                break
            if delta.cached_tokens is not None:
                self.cached_tokens = delta.cached_tokens
            token_ids = delta.token_ids
            self.num_tokens += len(token_ids)
            texts.append(feed(token_ids[0]) if len(token_ids) == 1 else "".join(map(feed, token_ids)))
        return texts

    def feed_all(self, deltas: Sequence[TokenDelta]) -> list[Piece]:
        """:meth:`feed` for each of them, up to the end."""
        pieces: list[Piece] = []
        for delta in deltas:
            pieces.append(self.feed(delta))
            if self.finish_reason is not None:
                break
        return pieces

    def feed(self, delta: TokenDelta) -> Piece:
        """The text that these tokens complete; empty while a character or a possible stop string is open."""
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        shown: list[str] = []
        entries: list[TokenEntry] = []
        for position, token_id in enumerate(delta.token_ids, start=1):
            self.num_tokens += 1
            if delta.logprobs:
                entries.append(TokenEntry(token_id, self._num_chars, delta.logprobs[position - 1]))
            if delta.finish_reason == "stop" and position == len(delta.token_ids) and not self._rules.show_stop:
                break  # a stop token counts and is not shown
            if self._show(shown, self._detokenizer.feed(token_id)):
                return self._finish(shown, delta.token_ids[:position], entries, "stop", self._matcher.matched)
        if delta.finish_reason is None:
            return self._piece(shown, delta.token_ids, entries)
        if self._show(shown, self._detokenizer.flush()):
            return self._finish(shown, delta.token_ids, entries, "stop", self._matcher.matched)
        shown.append(self._matcher.flush())
        last = delta.token_ids[-1] if delta.token_ids and delta.finish_reason == "stop" else None
        stop_reason = None if last in self._eos_token_ids else last
        return self._finish(shown, delta.token_ids, entries, delta.finish_reason, stop_reason)

    def _show(self, shown: list[str], text: str) -> bool:
        """Take the next text; True if a stop string ended it."""
        self._num_chars += len(text)
        if self.num_tokens <= self._rules.min_tokens:
            shown.append(text)
            return False
        text, stopped = self._matcher.feed(text)
        shown.append(text)
        return stopped

    def _finish(
        self,
        shown: list[str],
        token_ids: tuple[int, ...],
        entries: list[TokenEntry],
        reason: FinishReason,
        stop_reason: str | int | None,
    ) -> Piece:
        self.finish_reason = reason
        return self._piece(shown, token_ids, entries, reason, stop_reason)

    def _piece(
        self,
        shown: list[str],
        token_ids: tuple[int, ...],
        entries: list[TokenEntry],
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> Piece:
        text, reader = "".join(shown), self._reader
        if reader is None or self._rules.calls is None:
            return Piece(text, token_ids, reason, stop_reason, tuple(entries))
        text = reader.feed(text)
        if reason is not None:
            text += reader.finish()
        ended = reason == "stop" and reader.num_calls > 0 and not reader.cut
        ends_by_call = ended and self._rules.calls.ends_by_call
        return Piece(text, token_ids, reason, stop_reason, tuple(entries), reader.take(), ends_by_call)
