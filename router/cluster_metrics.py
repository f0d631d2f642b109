"""What the dispatcher's side of the router measures: nodes, queue, open dispatches."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from router.mailbox import Switchboard
from router.queue import WaitingLine
from router.registry import NodeRegistry


class ClusterMetrics:
    """A Prometheus collector; reads the live objects when scraped."""

    def __init__(self, registry: NodeRegistry, line: WaitingLine, switchboard: Switchboard) -> None:
        self._registry = registry
        self._line = line
        self._switchboard = switchboard

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        nodes = GaugeMetricFamily("baton_router_nodes", "Nodes by role and state.", labels=["role", "state"])
        counts = {(role, state): 0 for role in ("prefill", "decode") for state in ("alive", "silent")}
        for node in self._registry.all_nodes():
            counts[(node.record.role, "alive" if node.usable else "silent")] += 1
        for labels, count in counts.items():
            nodes.add_metric(list(labels), count)
        yield nodes
        yield GaugeMetricFamily("baton_router_requests_waiting", "Requests in the router's queue.", len(self._line))
        yield GaugeMetricFamily(
            "baton_router_dispatches_open",
            "Dispatches that nodes have not finished or confirmed ended.",
            len(self._switchboard),
        )
