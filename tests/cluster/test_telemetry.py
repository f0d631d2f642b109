"""One record, one line; counters and gauges in Prometheus' words."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.telemetry import Sample, render_metrics, setup_logging


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """`setup_logging` replaces the root's handlers, and closes them: pytest's have to be out of the way."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers[:] = []
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_a_record_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("node%s\n")
    hostile = "a\r\n2026-01-01 ERROR forged\x1b[2Jb\x9b2J\x00\u2028c\u202ed"
    logging.getLogger("x").warning("said %s", hostile)
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.isprintable()
    assert "node%s\\n WARNING x: said a\\r\\n2026" in line


def test_times_are_those_of_logging() -> None:
    setup_logging("node")
    (handler,) = logging.getLogger().handlers
    usual = logging.Formatter()
    record = logging.makeLogRecord({})
    for created in (1e9, 1e9 + 0.25, 1e9 + 1.999, 1e9 + 0.5, 2e9):
        record.created, record.msecs = created, created % 1 * 1000
        assert handler.formatter is not None
        assert handler.formatter.formatTime(record) == usual.formatTime(record)


def test_a_traceback_cannot_pass_for_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("node")
    try:
        raise ValueError("x\n2026-01-01 node ERROR forged: \x1b[2J")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    first, *rest = capsys.readouterr().err.rstrip("\n").split("\n")
    assert "it failed" in first
    assert rest
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_metrics_are_read_when_rendered() -> None:
    values = {"value": 1.0}

    def read() -> Iterator[Sample]:
        yield Sample("things_total", "Things.", values["value"])
        yield Sample("blocks", "Blocks.", 3, {"state": "free"})
        yield Sample("blocks", "Blocks.", 4, {"state": 'a"\n\\b'})

    render = render_metrics(read)
    values["value"] = 2.0
    families = {f.name: f for f in text_string_to_metric_families(render().decode())}
    assert families["baton_things"].type == "counter"
    assert families["baton_things"].samples[0].value == 2.0
    assert [(s.labels["state"], s.value) for s in families["baton_blocks"].samples] == [("free", 3), ('a"\n\\b', 4)]
