"""Fields of requests that nobody here knows. They are ignored, as OpenAI's clients want it; an operator hears of each
once, since a misspelt option changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

log = logging.getLogger(__name__)

MAX_NAMES: Final = 256
MAX_NAME_LEN: Final = 64

# OpenAI's fields that say nothing about the answer: taken, and not worth a line.
_IDLE: Final = frozenset(
    (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    )
)


class UnknownFields:
    """Remembers which names were logged, at most :data:`MAX_NAMES`: clients choose them."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: Iterable[str], known: Collection[str]) -> None:
        """Log those of one request's fields that are not ``known`` and were never logged, in a form safe for logs."""
        for name in names:
            if name in known or name in _IDLE:
                continue
            shown = ascii(name[:MAX_NAME_LEN])
            if shown in self._logged or len(self._logged) > MAX_NAMES:
                continue
            if len(self._logged) < MAX_NAMES:
                log.warning("request field %s is unknown and ignored (said once)", shown)
            else:
                log.warning("more than %d unknown request fields: no further one will be named", MAX_NAMES)
            self._logged.add(shown)
