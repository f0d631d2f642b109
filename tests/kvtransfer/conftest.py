from __future__ import annotations

import pytest
from kv_harness import Node, io_threads


@pytest.fixture
def nodes():
    """Makes nodes; closes them at the end and checks that nothing of them is left."""
    made: list[Node] = []

    def make(schemes, node_id, **options) -> Node:
        made.append(Node(schemes, node_id, **options))
        return made[-1]

    yield make
    for node in made:
        node.close()
    for node in made:
        stats = node.plane.stats()
        assert (stats.open_tickets, stats.open_pushes, stats.connections) == (0, 0, 0)
    assert io_threads() == []
