"""torch without its shape functions, in processes of their own: this one has imported everything already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

QUICK = """
import sys
from engine.quick_torch import import_torch
import_torch()
import torch
assert "torch._refs" not in sys.modules, "import torch has changed: engine.quick_torch leaves nothing out"
assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 2), torch.full((2, 2), 3.0))
"""

WHOLE_AFTER_ALL = """
import torch._meta_registrations
assert torch._meta_registrations.__file__
assert (torch.empty(2, 3, device="meta") @ torch.empty(3, 4, device="meta")).shape == (2, 4)
import_torch()
"""


def _run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_computes_without_what_compilers_need() -> None:
    _run(QUICK)


def test_what_was_left_out_can_be_had_later() -> None:
    _run(QUICK + WHOLE_AFTER_ALL)


def test_a_torch_that_is_there_stays_whole() -> None:
    _run(
        "import torch\n"
        "from engine.quick_torch import import_torch\n"
        "import_torch()\n"
        "assert torch._meta_registrations.__file__\n"
    )
