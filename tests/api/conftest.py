"""One deployment for all tests here: real uvicorn, real nodes, and Hugging Face to say what is right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers

from tests.system.stack import Stack, running_stack, wait_for

MODEL = "smollm2-135m"
# Not a multiple of the block size, and several chunks for most prompts.
OPTIONS = ("--max-batch-tokens", "40", "--block-size", "16", "--kv-blocks", "256", "--transport", "tcp")
LogSoftmax = Callable[[Sequence[int]], Any]


@pytest.fixture(scope="session")
def log_softmax(demo_model_dir: Path) -> LogSoftmax:
    """Hugging Face's log-probabilities after each token of a sequence, float64 ``[len, vocab_size]``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32).eval()

    def compute(token_ids: Sequence[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([list(token_ids)])).logits[0].double().log_softmax(-1)

    return compute


@pytest.fixture(scope="session")
def text_tokenizer(demo_model_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    with running_stack(demo_model_dir, options=OPTIONS) as running:
        meet(running)
        yield running


def meet(stack: Stack) -> None:
    """Until a request has been served: the pair has met then, its connections are open.

    On a busy machine a node may miss the router's pings just after it has joined.
    """

    def served() -> bool:
        with stack.client() as client:
            return client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2}).status_code == 200

    wait_for("a first answer", served, 60)


@pytest.fixture(scope="module")
def nothing_left(stack: Stack) -> Iterator[None]:
    """After a file's tests the nodes hold what they held before."""
    before = stack.holdings()
    yield
    wait_for("everything given back", lambda: stack.holdings() == before)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="k", max_retries=0) as made:
        yield made


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with stack.client() as made:
        yield made


async def gather_posts(stack: Stack, path: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All at once; the answers in the order of the bodies."""
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=300, trust_env=False) as client:
        answers = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]
