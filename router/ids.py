"""Names for requests and answers, which nobody can guess."""

from __future__ import annotations

import secrets
from typing import Final

_DIGITS: Final = 32
_AT_ONCE: Final = 256
_ready: list[str] = []


def new_id() -> str:
    """32 hexadecimal digits. Many are drawn at once: asking the system for one takes longer than to use it."""
    if not _ready:
        digits = secrets.token_hex(_AT_ONCE * _DIGITS // 2)
        _ready.extend(digits[start : start + _DIGITS] for start in range(0, len(digits), _DIGITS))
    return _ready.pop()
