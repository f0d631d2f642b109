"""What a request asks of the engine, in the form that crosses the wire."""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

RequestId = NewType("RequestId", str)
FinishReason = Literal["stop", "length"]


class RequestKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One dispatch of one request: the id is ours (never the client's), ``attempt`` numbers its dispatches."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens, checked by the router before it is built.

    ``max_tokens`` counts generated tokens including token 0. ``temperature`` 0 is greedy. ``seed`` is always
    set: the router draws one for an unseeded request, so that a failover draws the same noise.
    ``stop_token_ids`` already holds the model's EOS ids unless the client asked to ignore them; stop strings
    are the router's business.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0


def finish_reason(sampling: SamplingParams, token_id: int, num_generated: int) -> FinishReason | None:
    """Why generation ends with ``token_id`` as its ``num_generated``-th token, or None if it goes on.

    The one place that decides it, used for token 0 on the prefill node and for the others on the decode node.
    """
    if token_id in sampling.stop_token_ids:
        return "stop"
    if num_generated >= sampling.max_tokens:
        return "length"
    return None
