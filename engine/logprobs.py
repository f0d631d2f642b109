"""Log-probabilities of chosen and of most likely tokens, in the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.request import LOGPROB_FLOOR, MAX_LOGPROBS, TokenLogprobs
from engine.candidates import Logits, top, weights


def token_logprobs(
    logits: Logits, token_ids: Sequence[int], num_top: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprobs]:
    """Each row's chosen token and its ``num_top`` (at most :data:`MAX_LOGPROBS`) most likely ones.

    ``logits``: finite ``[num_rows, vocab_size]``, as the model gave them: before temperature, penalties,
    bias and filters (vLLM's default, ``raw_logprobs``). Values are float32, floored at :data:`LOGPROB_FLOOR`; a
    chosen token that is among the likeliest has the very same value there. Equals by ascending id. A vocabulary of
    fewer tokens gives as many as it has. Ranks are counted if they are to be (``ranked``).
    """
    # The same number of candidates for every batch: which of several equals is the last must not depend on others.
    likeliest = top(logits, MAX_LOGPROBS)
    chosen = logits[np.arange(len(token_ids)), token_ids]
    greatest = likeliest.logits[:, 0]
    total = [float(np.add.reduce(weights(*row, np.float32(1)))) for row in zip(logits, greatest, strict=True)]
    wanted = np.concatenate((chosen[:, None], likeliest.logits), axis=1).astype(np.float64)
    values = wanted - greatest[:, None] - np.log(np.array(total))[:, None]
    values = values.clip(LOGPROB_FLOOR, 0.0).astype(np.float32)
    ranks = (logits >= chosen[:, None]).sum(axis=1).tolist() if ranked else [0] * len(token_ids)
    return [
        TokenLogprobs(row[0], tuple(zip(ids[:count], row[1 : count + 1], strict=False)), rank)
        for row, ids, count, rank in zip(values.tolist(), likeliest.token_ids.tolist(), num_top, ranks, strict=True)
    ]
