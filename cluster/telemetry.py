"""Logging and metrics set up once per process, the same way everywhere."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from cluster.config import log_level

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "baton_"
# C0 and C1 controls (terminal escapes), line separators, and marks that reorder text.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Sample:
    """One number to export. A name that ends in ``_total`` is a counter, any other a gauge.

    With ``buckets``, (upper bound, how many were not above it) with ``inf`` last, it is a histogram and ``value`` the
    sum of what was observed.
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[tuple[float, int], ...] = ()


def setup_logging(process: str) -> None:
    """Log lines to stderr: time, process, level, message. Control characters from outside are escaped."""
    handler = logging.StreamHandler()
    name = _escaped(process).replace("%", "%%")
    handler.setFormatter(_OneLineFormatter(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"))
    # What our lines do not show is not looked up either (the logging HOWTO's "Optimization").
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=log_level(), handlers=[handler], force=True)


def render_metrics(read: Callable[[], Iterable[Sample]]) -> Callable[[], bytes]:
    """A function that renders ``read()`` in Prometheus' text format, for services that keep plain counters."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reader(read))
    return lambda: generate_latest(registry)


class _OneLineFormatter(logging.Formatter):
    """One record, one line; the lines of a traceback are indented, so that none can pass for a record."""

    _second = -1
    _written_second = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 - logging's
        second = int(record.created)
        if second != self._second:  # a busy process has thousands of lines a second
            self._second, self._written_second = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._written_second},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return "\n".join("    " + _escaped(line) for line in super().formatException(ei).split("\n"))


def _escaped(text: str) -> str:
    if text.isprintable():  # then none of them is in it
        return text
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _bound(upper: float) -> str:
    return "+Inf" if upper == inf else repr(upper)


class _Reader:
    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for sample in self._read():
            family = families.get(sample.name)
            names = sorted(sample.labels)
            values = [sample.labels[name] for name in names]
            if sample.buckets:
                family = families.setdefault(
                    sample.name, HistogramMetricFamily(_PREFIX + sample.name, sample.help, labels=names)
                )
                buckets = [(_bound(bound), count) for bound, count in sample.buckets]
                family.add_metric(values, buckets, sample.value)  # type: ignore[attr-defined]
                continue
            if family is None:
                kind = CounterMetricFamily if sample.name.endswith("_total") else GaugeMetricFamily
                family = families[sample.name] = kind(_PREFIX + sample.name, sample.help, labels=names)
            family.add_metric(values, sample.value)  # type: ignore[attr-defined]
        yield from families.values()
