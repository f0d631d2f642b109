from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine.candidates import argmax, top  # noqa: E402


@pytest.mark.parametrize("vocab_size", [1, 7, 96, 6143, 6144, 6207, 6208, 6209, 9999])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_the_greatest_of_each_row_in_order(vocab_size: int, step: float) -> None:
    """With ``step`` there are equals everywhere; which of them is last is not defined."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    logits[1, vocab_size // 2 :] = -torch.inf
    found = top(logits, 96)
    count = min(96, vocab_size)
    assert found.logits.shape == found.token_ids.shape == (5, count)
    assert found.whole == (vocab_size <= 96)
    order = np.lexsort((np.broadcast_to(np.arange(vocab_size), logits.shape), -logits.numpy()))
    wanted = np.take_along_axis(logits.numpy(), order, 1)[:, :count]
    assert (found.logits == wanted).all()
    assert (np.take_along_axis(logits.numpy(), found.token_ids, 1) == found.logits).all()
    assert all(len(set(row)) == count for row in found.token_ids.tolist())
    above = found.logits > found.logits[:, -1:]
    assert (found.token_ids == order[:, :count])[above].all()


def test_argmax_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert argmax(logits) == [1, 0]
