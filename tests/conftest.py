"""What all tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model_store import DEMO_MODEL, ModelFilesError, resolve_model

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="tests/clients: fewer requests, for CI")
    parser.addoption(
        "--full", action="store_true", help="all combinations of the longest tests, not the part that CI has time for"
    )
    parser.addoption("--cancels", type=int, default=500, help="requests cancelled in each case of test_cancels.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, fetched and converted once if it is not there."""
    try:
        return resolve_model(DEMO_MODEL).directory
    except ModelFilesError:
        subprocess.run([sys.executable, "-m", "engine.demo_model", DEMO_MODEL], check=True, cwd=ROOT)
        return resolve_model(DEMO_MODEL).directory
