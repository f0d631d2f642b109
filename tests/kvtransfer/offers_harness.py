"""What the tests of offers share."""

from __future__ import annotations

import numpy as np
from kv_harness import MAPPED, Node

from kvtransfer import ucx_outbound

BLOCK_BYTES = 1 << 20


def pair(nodes, scheme: str = MAPPED, **options) -> tuple[Node, Node]:
    options = {"num_blocks": 64, "block_bytes": BLOCK_BYTES} | options
    return nodes(scheme, "P", seed=1, **options), nodes(scheme, "D", **options)


def lanes(node: Node) -> str:
    (route,) = node.plane.stats().routes
    return route.lanes


def move(p: Node, d: Node, blocks: list[int]) -> None:
    ticket = d.grant(blocks, sender=p)
    p.plane.push(ticket, [(index, block) for index, block in enumerate(blocks)])
    d.wait_for(lambda: len(d.arrived(ticket.ticket_id)) == len(blocks))
    p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == len(blocks))
    assert np.array_equal(d.pool[blocks], p.pool[blocks])
    d.plane.complete(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)


def watch_sends(monkeypatch) -> list[int]:
    """Indexes of blocks that went as messages."""
    sent = []
    send = ucx_outbound.Link._send

    def watched(self, push, item, reply_to):
        sent.append(item.index)
        send(self, push, item, reply_to)

    monkeypatch.setattr(ucx_outbound.Link, "_send", watched)
    return sent


def wait_for_links(node: Node) -> list[ucx_outbound.Link]:
    links = node.plane._roads["ucx"]._sender._links
    node.wait_for(lambda: links)
    return list(links.values())


def mapped_peers(node: Node) -> set[str]:
    return {peer.node_id for peer in node.plane._roads["ucx"]._memories._mapped}
