"""Why two nodes may not work together, in words for an operator. Pure."""

from __future__ import annotations

from cluster.membership import NodeRecord

_SHOWN_CHARS = 48


def why_apart(one: NodeRecord, other: NodeRecord) -> str | None:
    """In what the KV of two nodes differs, or None if they fit. Block sizes may differ.

    The words come from Redis: they are cut, and whoever logs or sends them escapes them.
    """
    if one.fingerprint == other.fingerprint:
        return None
    names = [name for name in one.layout if name in other.layout and one.layout[name] != other.layout[name]]
    shown = [f"{name} {_cut(one.layout[name])} and {_cut(other.layout[name])}" for name in names]
    differences = ", ".join(shown) or "their models or KV layouts differ"
    return f"{one.role} node {one.party.id} and {other.role} node {other.party.id} do not fit: {differences}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
