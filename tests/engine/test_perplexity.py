"""What narrow weights cost: perplexity on the repository's own documents, against float32."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from engine.kv_cache import KVCache  # noqa: E402
from engine.model import ForwardBatch, LlamaModel  # noqa: E402
from engine.model_config import Dtype, ModelConfig  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.spans import Spans  # noqa: E402
from tests import backends  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
NUM_TOKENS, WINDOW, BLOCK_SIZE = 4096, 512, 16


@pytest.fixture(scope="module")
def token_ids(smollm2_dir: Path) -> list[int]:
    pages = [ROOT / "README.md", ROOT / "compose" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    found: list[int] = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json")).encode(text).ids
    assert len(found) >= NUM_TOKENS
    return found[:NUM_TOKENS]


def perplexity(directory: Path, token_ids: list[int], dtype: Dtype) -> float:
    """Of all tokens but the first of each window, each given those before it in its window."""
    config = ModelConfig.from_directory(directory)
    model = LlamaModel(config, load_weights(directory, config, backends.make("native"), dtype))
    cache = KVCache(model.kv_layout(BLOCK_SIZE), WINDOW // BLOCK_SIZE)
    rows = torch.arange(WINDOW)
    spans = Spans.single(WINDOW, WINDOW, np.arange(WINDOW // BLOCK_SIZE, dtype=np.int32))
    loss = 0.0
    for start in range(0, len(token_ids), WINDOW):
        window = torch.tensor(token_ids[start : start + WINDOW])
        logits = model.forward(ForwardBatch(window, rows, rows, rows, spans), cache.pool)
        loss += torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="mean").item()
    return math.exp(loss / (len(token_ids) // WINDOW))


def test_narrow_weights_cost_less_than_a_percent(smollm2_dir: Path, token_ids: list[int]) -> None:
    wide = perplexity(smollm2_dir, token_ids, "float32")
    assert 1 < wide < 100
    assert abs(perplexity(smollm2_dir, token_ids, "bfloat16") / wide - 1) < 0.005
    assert abs(perplexity(smollm2_dir, token_ids, "int8") / wide - 1) < 0.01
