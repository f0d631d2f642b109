"""LangChain, litellm and `llm` get from real nodes what plain HTTP gets, and understand our refusals."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Tool
from tests.system.stack import Stack

pytestmark = [pytest.mark.clients, pytest.mark.system, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parent / "programs"
QUESTION = "What is the capital of France?"
# Neither reads a file of the user's, nor asks anybody but the server.
ALONE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def run(command: list[str], **environment: str) -> str:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "LANGCHAIN_", "LANGSMITH_"))
    }
    done = subprocess.run(command, capture_output=True, text=True, env={**own, **ALONE, **environment})
    print(done.stdout[-3000:], done.stderr[-5000:])
    assert done.returncode == 0
    return done.stdout


def chat(stack: Stack, content: str = QUESTION, max_tokens: int = 20) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": max_tokens}
    with stack.client() as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(stack: Stack, prompt: str) -> str:
    with stack.client() as client:
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0}
        answer: str = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    return answer


def test_langchain(roomy: Stack, tool: Tool) -> None:
    python = str(tool("langchain", "python"))
    found = json.loads(run([python, str(PROGRAMS / "langchain_client.py"), f"{roomy.base_url}/v1"]))
    expected = chat(roomy)
    content = expected["choices"][0]["message"]["content"]
    assert (found["whole"], found["streamed"], found["asynchronous"]) == (content, content, content)
    assert found["finish"] == expected["choices"][0]["finish_reason"]
    assert found["usage"] == found["streamed_usage"] == expected["usage"]["total_tokens"]
    assert found["batch"] == [content, chat(roomy, "Say hello.")["choices"][0]["message"]["content"]]
    assert found["structured"]["name"] in ("Paris", "Rome")
    ((name, arguments),) = found["called"]
    assert (name, list(arguments)) == ("get_weather", ["name"])
    assert found["called_streamed"] == found["called"]
    assert found["parts"] > 1
    assert found["answered"]
    assert found["completion"] == text(roomy, "One, two, three,")
    assert found["texts"] == [text(roomy, f"Number {number},") for number in range(20)]
    assert "ContextOverflowError" in found["overflow"]


def test_litellm(roomy: Stack, tool: Tool) -> None:
    python = str(tool("litellm", "python"))
    found = json.loads(run([python, str(PROGRAMS / "litellm_client.py"), f"{roomy.base_url}/v1"]).splitlines()[-1])
    expected = chat(roomy)
    content = expected["choices"][0]["message"]["content"]
    for name in ("openai", "hosted_vllm"):
        one = found[name]
        assert [one[way] for way in ("whole", "streamed", "rebuilt", "asynchronous")] == [content] * 4
        assert one["finish"] == expected["choices"][0]["finish_reason"]
        assert one["usage"] == one["rebuilt_usage"] == expected["usage"]["total_tokens"]
        ((called, arguments),) = one["called"]
        assert (called, list(json.loads(arguments))) == ("get_weather", ["name"])
        assert one["called_streamed"] == one["called"]
    assert found["text"] == text(roomy, "One, two, three,")
    assert found["overflow"] == "ContextWindowExceededError"
    assert (found["bad"], found["missing"]) == ("BadRequestError", "NotFoundError")


@pytest.mark.parametrize("way", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_llm(roomy: Stack, tool: Tool, tmp_path: Path, way: list[str]) -> None:
    models = f"- model_id: m135\n  model_name: smollm2-135m\n  api_base: {roomy.base_url}/v1\n  supports_schema: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    options = ["-o", "temperature", "0", "-o", "max_tokens", "20", "--key", "k", *way]
    llm = str(tool("llm", "llm"))
    out = run([llm, "-m", "m135", QUESTION, *options], LLM_USER_PATH=str(tmp_path))
    expected = chat(roomy)
    assert out.rstrip("\n") == expected["choices"][0]["message"]["content"]
    (row,) = json.loads(run([llm, "logs", "list", "--json", "-n", "1"], LLM_USER_PATH=str(tmp_path)))
    assert (row["input_tokens"], row["output_tokens"]) == (
        expected["usage"]["prompt_tokens"],
        expected["usage"]["completion_tokens"],
    )
    schema = '{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}'
    made = run([llm, "-m", "m135", QUESTION, "--schema", schema, *options], LLM_USER_PATH=str(tmp_path))
    assert json.loads(made)["city"] in ("Paris", "Rome")
