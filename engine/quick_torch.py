"""Imports torch without what only its compilers use. For node processes; everything else just imports torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

# Shape functions of two thousand operators, for torch.compile, FakeTensor and the meta device: a node uses none, and
# they took a quarter of a node's imports. Measured with torch 2.13.
_FOR_COMPILERS: Final = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch, if nobody has. Who needs the module that was left out can still import it."""
    if "torch" in sys.modules:
        return
    sys.modules[_FOR_COMPILERS] = ModuleType(_FOR_COMPILERS)
    try:
        import torch
    finally:
        del sys.modules[_FOR_COMPILERS]
    vars(torch).pop("_meta_registrations", None)
