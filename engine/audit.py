"""The books of a node compared: what the block pool says against what the requests say. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.block_pool import BlockReport


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks one live request knows of: those it owns, and those it waits for in quarantine."""

    owned: Collection[int]
    quarantined: Collection[int] = ()


def find_orphans(reports: Iterable[BlockReport], held: Mapping[str, Held]) -> tuple[BlockReport, ...]:
    """Blocks that nobody will ever give back: an owner that is no live request, or one that does not know of them.

    ``reports`` are all blocks that are not free, ``held`` the live requests by the name under which they own blocks.
    """
    known = {
        (owner, state, block_id)
        for owner, theirs in held.items()
        for state, block_ids in (("owned", theirs.owned), ("quarantined", theirs.quarantined))
        for block_id in block_ids
    }
    return tuple(
        report
        for report in reports
        if not all((owner, report.state, report.block_id) in known for owner in report.owners)
    )
