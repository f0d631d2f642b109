"""schemathesis draws requests from ``/openapi.json``, good and bad ones, and holds every answer against it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import Tool
from tests.system.stack import Stack

pytestmark = [pytest.mark.clients, pytest.mark.system, pytest.mark.timeout(900)]

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Fewer of what generates: each takes the time of its tokens.
EXAMPLES = {"/v1/chat/completions": 40, "/v1/completions": 40, "/tokenize": 100, "/detokenize": 100}


@pytest.mark.parametrize("path", EXAMPLES)
def test_answers_conform(stack: Stack, tool: Tool, tmp_path: Path, path: str, quick: bool) -> None:
    num_examples = 5 if quick else EXAMPLES[path]
    command = [
        *(str(tool("schemathesis", "st")), "run", f"{stack.base_url}/openapi.json"),
        *("--phases", "examples,coverage,fuzzing", "-n", str(num_examples), "--include-path", path),
        *("-c", CHECKS, "--request-timeout", "120", "--seed", "1", "--no-color"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    print(run.stdout[-6000:], run.stderr[-2000:])
    assert run.returncode == 0
    assert stack.complete("Hello", 2)["choices"][0]["token_ids"]
