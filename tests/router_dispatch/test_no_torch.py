"""The router starts in a second on a small machine: nothing heavy may come along with it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "ucxx", "engine", "kvtransfer", "kernels")


def test_the_whole_router_imports_nothing_heavy() -> None:
    program = (
        f"import sys; import router.__main__, router.service;print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
