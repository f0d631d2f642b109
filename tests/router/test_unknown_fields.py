"""Fields that nobody knows: never an error, and each is logged once, whatever clients call it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from front_harness import CHAT, COMPLETIONS, HELLO, Front

from router.unknown_fields import MAX_NAMES, UnknownFields

LOGGER = "router.unknown_fields"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        (COMPLETIONS, {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_l6_a_field_is_logged_once_and_ignored(
    front: Front, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    name = f"temprature of {path}"
    idle = {"user": "u", "metadata": {}, "store": True, "service_tier": "auto", "verbosity": "low"}
    with caplog.at_level(logging.INFO, LOGGER):
        for value in (1, "xyzzy", None):
            front.replay("ok")
            response = await front.http.post(
                path, json=body | idle | {name: value, "seed" * 30: 1, "a\nb\x1b\u202e": 1}
            )
            assert response.status_code == 200, response.text
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert sum(repr(name) in line for line in lines) == 1
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert not any("xyzzy" in line or "'user'" in line for line in lines)


def test_clients_cannot_fill_the_log_or_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    with caplog.at_level(logging.INFO, LOGGER):
        for number in range(3 * MAX_NAMES):
            fields.note([f"field {number}", "known", "x" * 10_000], {"known"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == MAX_NAMES + 1
    assert "no further one" in lines[-1]
    assert max(map(len, lines)) < 200
    assert not any("known'" in line for line in lines)
