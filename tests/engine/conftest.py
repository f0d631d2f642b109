"""Engine fixtures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model_store import DEMO_MODEL, ModelFilesError, resolve_model
from kernels.backend import Backend
from tests import backends


@pytest.fixture(scope="module", params=backends.SERVING)
def ops(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    return backends.make(request.param)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The converted demo model; fetched once per machine."""
    try:
        return resolve_model(DEMO_MODEL).directory
    except ModelFilesError:
        subprocess.run([sys.executable, "-m", "engine.demo_model", DEMO_MODEL], check=True)
        return resolve_model(DEMO_MODEL).directory
