"""What the answers must be: Hugging Face `generate`, greedy, fp32, on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NEAR_TIE = 1e-4


class Oracle:
    """Token ids of greedy generation; None where Hugging Face itself is a near tie at some step."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # threads that spin are slow wherever something else runs too
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model.eval()
        self._known: dict[tuple[tuple[int, ...], int], list[int] | None] = {}

    def __call__(self, prompt: Sequence[int], max_tokens: int) -> list[int] | None:
        """The generated ids, EOS included if it was chosen."""
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            self._known[key] = self._generate(list(prompt), max_tokens)
        return self._known[key]

    def _generate(self, prompt: list[int], max_tokens: int) -> list[int] | None:
        torch = self._torch
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        for logits in out.logits:
            first, second = torch.topk(logits[0], 2).values.tolist()
            if first - second < NEAR_TIE:
                return None
        return [int(token) for token in out.sequences[0, len(prompt) :]]
