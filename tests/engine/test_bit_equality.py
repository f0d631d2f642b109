"""Native kernels: the logits of a token have the same bits in every setting.

Whatever the batch holds besides, wherever a prompt is cut, whichever blocks hold its cache, of whatever size, and with
however many threads. So what two pools of nodes compute together is what one node would have computed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine.kv_cache import KVCache  # noqa: E402
from engine.model import ForwardBatch, LlamaModel  # noqa: E402
from engine.model_config import Dtype, ModelConfig  # noqa: E402
from engine.weights import load_weights  # noqa: E402
from kernels.spans import Spans  # noqa: E402
from tests import backends  # noqa: E402

VOCABULARY = 301
LENGTHS = (1, 17, 64, 65, 150, 203)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The proportions of SmolLM2 (nine query heads on three of size 64), small."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=144,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )
    directory = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def load(directory: Path, name: str, threads: int, dtype: Dtype) -> LlamaModel:
    config = ModelConfig.from_directory(directory)
    return LlamaModel(config, load_weights(directory, config, backends.make(name, threads), dtype))


def all_logits(model: LlamaModel, prompts: list[list[int]], block_size: int, rng: random.Random) -> list[Any]:
    """Logits after every token of every prompt: random company, random cuts, random blocks."""
    cache = KVCache(model.kv_layout(block_size), 2000 // block_size)
    cache.pool.fill_(float("nan"))
    free = rng.sample(range(cache.num_blocks), cache.num_blocks)
    tables = [[free.pop() for _ in range(-(-len(prompt) // block_size))] for prompt in prompts]
    done = [0] * len(prompts)
    found: list[list[Any]] = [[] for _ in prompts]
    while live := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        counts = [min(rng.choice((1, 1, 2, 13, 48, 100)), len(prompts[i]) - done[i]) for i in chosen]
        batch = make_batch(prompts, tables, done, chosen, counts, block_size)
        rows = model.forward(batch, cache.pool).clone().split(counts)
        for i, count, logits in zip(chosen, counts, rows, strict=True):
            found[i].append(logits)
            done[i] += count
    return [torch.cat(rows) for rows in found]


def make_batch(
    prompts: list[list[int]],
    tables: list[list[int]],
    done: list[int],
    chosen: list[int],
    counts: list[int],
    block_size: int,
) -> ForwardBatch:
    positions = [np.arange(done[i], done[i] + count) for i, count in zip(chosen, counts, strict=True)]
    used = [tables[i][: -(-(done[i] + count) // block_size)] for i, count in zip(chosen, counts, strict=True)]
    slots = [
        np.array(table)[own // block_size] * block_size + own % block_size
        for table, own in zip(used, positions, strict=True)
    ]
    rows = np.array(counts, dtype=np.int32)
    return ForwardBatch(
        token_ids=torch.tensor([prompts[i][p] for i, own in zip(chosen, positions, strict=True) for p in own]),
        positions=torch.from_numpy(np.concatenate(positions)),
        slots=torch.from_numpy(np.concatenate(slots)),
        sample_rows=torch.arange(sum(counts)),
        spans=Spans(
            first_rows=np.cumsum(rows, dtype=np.int32) - rows,
            num_rows=rows,
            context_lens=np.array([own[-1] + 1 for own in positions], dtype=np.int32),
            table_starts=np.cumsum([0, *map(len, used)], dtype=np.int32),
            block_ids=np.array([block for table in used for block in table], dtype=np.int32),
        ),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", backends.NATIVE)
def test_logits_have_the_same_bits_in_every_setting(model_dir: Path, name: str, dtype: Dtype) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    models = {threads: load(model_dir, name, threads, dtype) for threads in (1, 2)}
    alone = [all_logits(models[1], [prompt], 16, random.Random(0))[0] for prompt in prompts]
    assert all(logits.isfinite().all() for logits in alone)
    for trial in range(6):
        block_size, threads = (16, 32)[trial % 2], (1, 2)[trial // 2 % 2]
        found = all_logits(models[threads], prompts, block_size, random.Random(trial))
        for logits, expected in zip(found, alone, strict=True):
            assert torch.equal(logits, expected)
