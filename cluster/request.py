"""What a request asks of the engine, in the form that crosses the wire."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NewType

import msgspec
from msgspec import Meta

RequestId = NewType("RequestId", str)
FinishReason = Literal["stop", "length"]

# Checked when a message is decoded, so that no node ever computes with a number it cannot hold (nor with NaN).
Count = Annotated[int, Meta(ge=0, le=2**62)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=1e6)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-9, le=1e9)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]

MAX_CHOICES: Final = 128
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]

MAX_LOGPROBS: Final = 20
MAX_GRAMMAR_LEN: Final = 64 << 10
LOGPROB_FLOOR: Final = -9999.0
Logprob = Annotated[float, Meta(ge=LOGPROB_FLOOR, le=0.0)]


# One token alone is banned once and for all: ``banned_token_ids``.
BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=2)]


class RequestKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One dispatch of one request: the id is ours (never the client's), ``attempt`` numbers its dispatches."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an answer must look like: a JSON schema, a regular expression or a grammar in llguidance's Lark dialect."""

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_LEN)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to choose tokens, checked by the router before it is built. Every default is neutral and takes no bytes.

    ``max_tokens`` counts generated tokens including token 0; with 0 the prompt is computed (and scored) and nothing is
    drawn, of any choice. ``seed`` is always set: the router draws one for an unseeded request, so that a failover draws
    the same noise. ``choice`` tells the answers to one prompt apart: ``num_choices`` of them are asked for at once,
    ``choice`` and those after it (:meth:`choices`).
    ``stop_token_ids`` already holds the model's EOS ids unless the client asked to ignore them; stop strings are the
    router's business. Token ids outside the model's vocabulary are no tokens: options that name them do nothing.

    In the order in which they act, as in vLLM:

    * only ``allowed_token_ids`` (None: all) that are not ``banned_token_ids`` can be chosen, none that completes one of
      ``bad_words`` in the output, and none of ``stop_token_ids`` while fewer than ``min_tokens`` tokens are generated;
    * ``logit_bias`` is added to the logits of (token id, bias) pairs;
    * ``repetition_penalty`` divides the positive and multiplies the negative logits of all tokens of the prompt and
      the output; ``frequency_penalty`` is subtracted for each time a token was generated, ``presence_penalty`` once;
    * ``temperature`` 0 takes the most likely token, the rest does not matter then; otherwise it divides the logits;
    * ``min_p`` keeps tokens with at least that part of the greatest probability, ``top_k`` (0: all) the most likely
      so many of them, ``top_p`` the fewest most likely of those whose renormalised probabilities reach it.

    With a ``grammar`` only what it lets follow the output can be chosen, and the model's EOS where it may end: before
    ``temperature`` and the filters. ``min_tokens`` does not keep an answer from ending that can only end.

    ``num_logprobs`` (None: none) asks for the log-probability of each generated token and of so many most likely
    ones, at most :data:`MAX_LOGPROBS`, in the model's own distribution: before all of the above.
    """

    max_tokens: Count
    temperature: Temperature = 0.0
    top_k: Count = 0
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    seed: int = 0
    choice: Count = 0
    num_choices: NumChoices = 1
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: Count = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: tuple[tuple[TokenId, Bias], ...] = ()
    allowed_token_ids: tuple[TokenId, ...] | None = None
    banned_token_ids: tuple[TokenId, ...] = ()
    bad_words: tuple[BadWord, ...] = ()
    num_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Grammar | None = None

    @property
    def prefill_only(self) -> bool:
        """True if no token is generated: the request never needs a decode node."""
        return self.max_tokens == 0

    def choices(self) -> tuple[SamplingParams, ...]:
        """One for each choice, in order, as if it had been asked for alone."""
        if self.num_choices == 1:
            return (self,)
        numbers = range(self.choice, self.choice + self.num_choices)
        return tuple(msgspec.structs.replace(self, choice=number, num_choices=1) for number in numbers)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True if the tokens so far change what comes next by more than the model: their counts must be kept."""
        return self.repetition_penalty != 1.0 or self.counts_output

    @property
    def counts_output(self) -> bool:
        """True if it matters how often a token was generated."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_output(self) -> bool:
        """True if what may come next depends on which tokens were generated, and in which order: they must be kept."""
        return self.grammar is not None or bool(self.bad_words)

    def edits_logits(self, num_generated: int) -> bool:
        """True if any option changes the logits for the token after ``num_generated`` ones."""
        return (
            self.penalised
            or self.reads_output
            or bool(self.logit_bias or self.banned_token_ids)
            or self.allowed_token_ids is not None
            or (num_generated < self.min_tokens and bool(self.stop_token_ids))
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One generated token's log-probability and the most likely tokens at its place, likeliest first.

    Of the model's distribution, before temperature, penalties, bias and filters (vLLM's default, ``raw_logprobs``).
    Never below :data:`LOGPROB_FLOOR`. If the generated token is among ``top``, the two values are the same float.
    ``rank`` says of a prompt's token how many of the vocabulary are at least as likely (itself included, so that the
    likeliest has 1); of a generated one it is not counted, 0.
    """

    chosen: Logprob
    top: tuple[tuple[TokenId, Logprob], ...] = ()
    rank: Count = 0


def finish_reason(sampling: SamplingParams, token_id: int, num_generated: int) -> FinishReason | None:
    """Why generation ends with ``token_id`` as its ``num_generated``-th token, or None if it goes on.

    The one place that decides it, used for token 0 on the prefill node and for the others on the decode node.
    """
    if token_id in sampling.stop_token_ids:
        return "stop"
    if num_generated >= sampling.max_tokens:
        return "length"
    return None
