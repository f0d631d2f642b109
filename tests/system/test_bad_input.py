"""Bad input through the whole stack: a clear 4xx in JSON, no prompt text in it, and a healthy server after."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.system.stack import Stack, running_stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SECRET_WORD = "zanzibar"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Check = Callable[..., AbstractContextManager[None]]
USER = {"role": "user", "content": SECRET_WORD}


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    # A pool smaller than the context: a prompt may fit the model and not the node.
    with running_stack(demo_model_dir, options=("--kv-blocks", "64", "--transport", "tcp")) as running:
        running.complete("Hello", 2)
        yield running


BAD: list[tuple[str, bytes | dict[str, Any], int, str]] = [
    (COMPLETIONS, b"{not json", 400, ""),
    (COMPLETIONS, b"", 400, ""),
    (COMPLETIONS, b"[]", 400, ""),
    (COMPLETIONS, {"prompt": SECRET_WORD, "model": "no-such-model"}, 404, "model"),
    (COMPLETIONS, {"prompt": SECRET_WORD, "max_tokens": "many"}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": SECRET_WORD, "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": SECRET_WORD, "temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {"prompt": SECRET_WORD, "max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": {"text": SECRET_WORD}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, 49152]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"max_tokens": 3}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 9000}, 400, "maximum context length"),
    (COMPLETIONS, {"prompt": [5] * 1500, "max_tokens": 4}, 400, ""),
    (COMPLETIONS, {"prompt": [5] * 1000, "max_tokens": 500}, 400, ""),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": SECRET_WORD}]}, 400, "role"),
    (CHAT, {"messages": [USER], "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": [USER], "stream": True, "n": 100}, 400, "n"),
    ("/v1/nothing", {"prompt": SECRET_WORD}, 404, ""),
]


@pytest.mark.parametrize(("path", "body", "status", "named"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_clearly(
    stack: Stack, path: str, body: bytes | dict[str, Any], status: int, named: str, nothing_left: Check
) -> None:
    with nothing_left(stack), stack.client(timeout=30) as client:
        if isinstance(body, bytes):
            response = client.post(path, content=body, headers={"content-type": "application/json"})
        else:
            response = client.post(path, json=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert named in error["message"] or named == error["param"]
        assert error["type"]
        assert SECRET_WORD not in response.text
        assert not re.search(r"/(home|root|tmp|usr|var|opt|models?/)|0x[0-9a-f]{6}", error["message"])
        assert client.get("/health").status_code == 200


def test_the_server_still_answers_right(stack: Stack) -> None:
    with stack.client() as client:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        # Without max_tokens a chat may go on to the end of the context: the router cuts that to the pool.
        response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
