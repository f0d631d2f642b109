"""Puts the tokens of one dispatch in order: for each choice token 0, then the decode node's, without a gap. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import TransferError
from cluster.request import SamplingParams, TokenLogprobs
from cluster.wire import FirstToken, PromptLogprobs, Token0, TokenItem
from router.generation import TokenDelta


class TokenOrder:
    """Follows the choices that ``sampling`` asks for. Deltas number them from 0, the wire from ``sampling.choice``.

    ``started`` once token 0 has come. ``cut`` once the reader has ended a choice: its nodes may not know that yet.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._first = sampling.choice
        self._num_choices = sampling.num_choices
        self._prefill_only = sampling.prefill_only
        self._next_index: dict[int, int] = {}
        self._early: list[TokenItem] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.started = False
        self.cut = False

    @property
    def over(self) -> bool:
        """True once every choice has ended."""
        return self.started and not self._next_index

    @property
    def complete(self) -> bool:
        """True once the nodes have ended every choice: there is nothing to cancel."""
        return self.over and not self.cut

    def take(self, message: PromptLogprobs | Token0 | TokenItem) -> Sequence[TokenDelta]:
        """The deltas that come with ``message``.

        The prompt's log-probabilities wait for token 0 of choice 0. Token 0 may come after tokens that follow it.
        Raises :class:`TransferError` for a token that is missing, comes twice or belongs to no choice.
        """
        match message:
            case TokenItem():
                delta = self.follow(message)
                return () if delta is None else (delta,)
            case Token0():
                return self._start(message)
            case PromptLogprobs():
                self._score(message)
        return ()

    def drop(self, choice: int) -> bool:
        """The reader wants no more of this choice. Whether that is news."""
        news = self._next_index.pop(choice, None) is not None
        self.cut = self.cut or news
        return news

    def _score(self, message: PromptLogprobs) -> None:
        if self.started or message.start != len(self._prompt_logprobs) + 1:
            raise TransferError("the prompt's log-probabilities came out of order")
        self._prompt_logprobs.extend(message.logprobs)

    def _start(self, token0: Token0) -> list[TokenDelta]:
        numbers = [first.choice for first in token0.choices]
        asked = range(self._first, self._first + (0 if self._prefill_only else self._num_choices))
        if self.started or numbers != list(asked):
            raise TransferError("the prefill node sent other first tokens than were asked for")
        self.started = True
        if self._prefill_only:
            return self._scored(token0.cached_tokens)
        self._next_index = {choice: 1 for choice, first in enumerate(token0.choices) if first.finish_reason is None}
        deltas = [self._first_delta(choice, first, token0.cached_tokens) for choice, first in enumerate(token0.choices)]
        early, self._early = self._early, []
        deltas += filter(None, map(self.follow, early))
        return deltas

    def _scored(self, cached_tokens: int) -> list[TokenDelta]:
        """The prompt is computed: the end of every choice, of which no token was asked for."""
        first = TokenDelta((), "length", cached_tokens, prompt_logprobs=tuple(self._prompt_logprobs))
        return [first, *(TokenDelta((), "length", choice=choice) for choice in range(1, self._num_choices))]

    def _first_delta(self, choice: int, first: FirstToken, cached_tokens: int) -> TokenDelta:
        logprobs = () if first.logprobs is None else (first.logprobs,)
        if choice:
            return TokenDelta((first.token_id,), first.finish_reason, None, logprobs, choice)
        scores = tuple(self._prompt_logprobs)
        return TokenDelta((first.token_id,), first.finish_reason, cached_tokens, logprobs, choice, scores)

    def follow(self, item: TokenItem) -> TokenDelta | None:
        """:meth:`take` for most messages."""
        if not self.started:
            self._early.append(item)
            return None
        choice = item.choice - self._first
        if not 0 <= choice < self._num_choices:
            raise TransferError("the decode node sent tokens of a choice that was not asked for")
        expected = self._next_index.get(choice)
        if expected is None:
            return None  # it has ended here, and the decode node did not know yet
        if item.index != expected:
            raise TransferError("tokens were lost between the decode node and the router")
        token_ids, finish_reason = item.token_ids, item.finish_reason
        if finish_reason is None:
            self._next_index[choice] = expected + len(token_ids)
        else:
            del self._next_index[choice]
        return TokenDelta(token_ids, finish_reason, None, item.logprobs, choice)
