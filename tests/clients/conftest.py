"""A deployment for the clients, and where `scripts/test-clients` has put them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.conftest import meet
from tests.system.stack import ROOT, Stack, running_stack

Tool = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def tool() -> Tool:
    """The path of a program in a tool's own environment."""
    home = Path(os.environ.get("BATON_CLIENTS", ROOT / ".venv-clients"))

    def find(name: str, program: str) -> Path:
        found = home / name / "bin" / program
        assert found.is_file(), f"{found} is missing: run scripts/test-clients"
        return found.absolute()

    return find


@pytest.fixture(scope="session")
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    # A drawn chat without `max_tokens` may go on to the end of the context: a short one, so that it ends in time.
    with running_stack(demo_model_dir, options=("--transport", "tcp", "--max-model-len", "64")) as running:
        meet(running)
        yield running


@pytest.fixture(scope="session")
def roomy(demo_model_dir: Path) -> Iterator[Stack]:
    """Another one, with the model's whole context."""
    with running_stack(demo_model_dir, options=("--transport", "tcp")) as running:
        meet(running)
        yield running


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether there is time for a part only."""
    return bool(request.config.getoption("--quick"))
