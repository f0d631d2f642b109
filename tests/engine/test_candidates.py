from __future__ import annotations

import numpy as np
import pytest

from engine.candidates import top


@pytest.mark.parametrize("vocab_size", [1, 7, 96, 3000, 3071, 3072, 3087, 3088, 3089, 3103, 9999])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_the_greatest_of_each_row_in_order(vocab_size: int, step: float) -> None:
    """With ``step`` there are equals everywhere; which of them is last is not defined."""
    logits = (np.random.default_rng(vocab_size).standard_normal((5, vocab_size)) * 3).astype(np.float32)
    if step:
        logits = (logits / step).round() * np.float32(step)
    logits[1, vocab_size // 2 :] = -np.inf
    found = top(logits, 96)
    count = min(96, vocab_size)
    assert found.logits.shape == found.token_ids.shape == (5, count)
    assert found.whole == (vocab_size <= 96)
    order = np.lexsort((np.broadcast_to(np.arange(vocab_size), logits.shape), -logits))
    wanted = np.take_along_axis(logits, order, 1)[:, :count]
    assert (found.logits == wanted).all()
    assert (np.take_along_axis(logits, found.token_ids, 1) == found.logits).all()
    assert all(len(set(row)) == count for row in found.token_ids.tolist())
    above = found.logits > found.logits[:, -1:]
    assert (found.token_ids == order[:, :count])[above].all()
