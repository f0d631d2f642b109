"""What the HTTP front measures. Label values come from fixed lists here, never from a client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
Endpoint = Literal["completions", "chat", "other"]
# ok: answered in full. invalid: the request's fault. overloaded: 429. unavailable: 503 or 504. error: our fault.
# broken: failed after the first byte. cancelled: the client left. slow_client: it stopped reading.
Outcome = Literal["ok", "invalid", "overloaded", "unavailable", "error", "broken", "cancelled", "slow_client"]

_TTFT_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2, 5)
_DURATION_BUCKETS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 240, 480)


class TokenHistogram(Collector):
    """A histogram that is told of every token, where prometheus_client's own, with its locks, is too slow.

    For one thread only, the event loop's.
    """

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = (*buckets, inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client's collectors."""
        counts = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(self._name, self._documentation, buckets=list(counts), sum_value=self._sum)


class Metrics:
    """The front's series, in a registry of their own; other parts of the router add theirs to ``registry``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "baton_router_requests_total",
            "HTTP requests answered or given up, by endpoint and outcome.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "baton_router_requests_in_flight",
            "Completion and chat requests that have arrived and not ended.",
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "baton_router_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = TokenHistogram(
            "baton_router_inter_token_latency_seconds",
            "Between two arrivals of tokens of one answer.",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "baton_router_request_duration_seconds",
            "From a completion or chat request's arrival to its end, whatever the end.",
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "baton_router_prompt_tokens_total", "Prompt tokens of answered requests.", registry=self.registry
        )
        self.cached_prompt_tokens = Counter(
            "baton_router_cached_prompt_tokens_total",
            "Prompt tokens of answered requests that a prefix cache held.",
            registry=self.registry,
        )
        self.generation_tokens = Counter(
            "baton_router_generation_tokens_total", "Tokens generated.", registry=self.registry
        )

    def ended(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """Count one request."""
        self.requests.labels(endpoint, outcome).inc()

    def text(self) -> bytes:
        """Everything in the registry, in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)


def outcome_of_status(status: int) -> Outcome:
    """The outcome of a request that was answered as a whole with this status."""
    if status < 400:
        return "ok"
    if status == 429:
        return "overloaded"
    if status in (503, 504):
        return "unavailable"
    return "invalid" if status < 500 else "error"
