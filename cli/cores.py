"""Which CPUs each node gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def share_cores(cpus: Sequence[int], num_nodes: int) -> list[tuple[int, ...]]:
    """Disjoint CPUs for each node, as even as they come; with more nodes than CPUs, one each, in turn.

    Two processes whose threads spin on the same CPUs run many times slower than one after the other, so nodes of
    one machine never share while there is a choice.
    """
    if not cpus or num_nodes < 1:
        raise ValueError("at least one CPU and one node are needed")
    if num_nodes > len(cpus):
        return [(cpus[i % len(cpus)],) for i in range(num_nodes)]
    base, extra = divmod(len(cpus), num_nodes)
    shares: list[tuple[int, ...]] = []
    start = 0
    for i in range(num_nodes):
        end = start + base + (1 if i < extra else 0)
        shares.append(tuple(cpus[start:end]))
        start = end
    return shares
