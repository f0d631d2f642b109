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


# Together these take as long as the first alone. Threads of one run (`--workers`) will not do: in Python 3.11 two that
# parse at once fail with "AST constructor recursion depth mismatch".
QUICK = [["/v1/chat/completions"], ["/v1/completions", "/tokenize", "/detokenize"]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("--quick"):
        metafunc.parametrize(("groups", "num_examples"), [(QUICK, 5)], ids=["at once"])
    else:
        runs = [([[path]], num_examples) for path, num_examples in EXAMPLES.items()]
        metafunc.parametrize(("groups", "num_examples"), runs, ids=list(EXAMPLES))


def test_answers_conform(stack: Stack, tool: Tool, tmp_path: Path, groups: list[list[str]], num_examples: int) -> None:
    command = [
        *(str(tool("schemathesis", "st")), "run", f"{stack.base_url}/openapi.json"),
        *("--phases", "examples,coverage,fuzzing", "-n", str(num_examples)),
        *("-c", CHECKS, "--request-timeout", "120", "--seed", "1", "--no-color"),
    ]
    runs = []
    for number, paths in enumerate(groups):
        included = [word for path in paths for word in ("--include-path", path)]
        folder = tmp_path / str(number)
        folder.mkdir()
        with (folder / "out").open("w") as out:
            runs.append(subprocess.Popen([*command, *included], stdout=out, stderr=subprocess.STDOUT, cwd=folder))
    statuses = [run.wait() for run in runs]
    for number, paths in enumerate(groups):
        shown = (tmp_path / str(number) / "out").read_text()
        print(shown[-6000:])
        assert f"Tested: {len(paths)}" in shown
    assert statuses == [0] * len(groups)
    assert stack.complete("Hello", 2)["choices"][0]["token_ids"]
