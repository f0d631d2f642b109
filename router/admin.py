"""The operator's port: metrics and a view of what the router knows, without a key, for this machine only by default."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.generation import Generator
from router.limits import KeyLimits
from router.mailbox import Switchboard
from router.metrics import METRICS_CONTENT_TYPE, Metrics
from router.queue import WaitingLine
from router.registry import Node, NodeRegistry

_JSON: Final = "application/json"


class RouterView:
    """What may be seen of a router; reads only."""

    def __init__(
        self, registry: NodeRegistry, line: WaitingLine, switchboard: Switchboard, limits: KeyLimits, node_id: str
    ) -> None:
        self._registry = registry
        self._line = line
        self._switchboard = switchboard
        self._limits = limits
        self._node_id = node_id

    def debug(self) -> dict[str, Any]:
        """Every node and every dispatch this router still answers for."""
        now = time.monotonic()
        return {
            "router": self._node_id,
            "requests_waiting": len(self._line),
            "requests_by_key": self._limits.running(),
            "nodes": [_node(node, now) for node in self._registry.all_nodes()],
            "dispatches": self._switchboard.report(),
        }


def create_admin_app(view: RouterView, generator: Generator, metrics: Metrics) -> Starlette:
    """The routes: /health, /ready, /metrics, /debug/router."""

    async def health(_request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type=_JSON)

    async def ready(_request: Request) -> Response:
        readiness = generator.ready()
        body = msgspec.json.encode({"ready": readiness.ready, "reason": readiness.reason})
        return Response(body, status_code=200 if readiness.ready else 503, media_type=_JSON)

    async def scrape(_request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": METRICS_CONTENT_TYPE})

    async def debug(_request: Request) -> Response:
        return Response(msgspec.json.encode(view.debug()), media_type=_JSON)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", scrape),
            Route("/debug/router", debug),
        ]
    )


def _node(node: Node, now: float) -> dict[str, Any]:
    record, load = node.record, node.load
    return {
        "id": record.party.id,
        "role": record.role,
        "epoch": record.party.epoch,
        "usable": node.usable,
        "heard_s_ago": round(now - node.heard_s, 3),
        "block_size": record.block_size,
        "num_blocks": record.num_blocks,
        "transports": list(record.transports),
        "running": load.num_running,
        "waiting": load.num_waiting,
        "own_requests": node.own_requests,
        "own_tokens": node.own_tokens,
        "refuses_for_s": round(max(0.0, node.refused_until_s - now), 3),
    }
