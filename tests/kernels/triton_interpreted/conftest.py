"""These tests interpret the kernels. Triton decides that when it is imported, for the whole process, so they run in
one of their own: `tests/kernels/test_triton.py` starts it, or ``TRITON_INTERPRET=1 pytest <this folder>``.
"""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    import torch

    @pytest.fixture(autouse=True)
    def seeded() -> None:
        torch.manual_seed(3)
