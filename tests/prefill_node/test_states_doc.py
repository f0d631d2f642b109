"""docs/states.md shows the very tables that the nodes run by."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.transitions import TransitionTable
from decode_node.branch import BRANCH
from decode_node.intake import INTAKE
from prefill_node.handoff import HANDOFF

DOC = Path(__file__).parent.parent.parent / "docs" / "states.md"


@pytest.mark.parametrize("table", [HANDOFF, INTAKE, BRANCH], ids=lambda table: table.name)
def test_the_diagram_is_the_table(table: TransitionTable) -> None:  # type: ignore[type-arg]
    assert f"```mermaid\n{table.mermaid()}\n```" in DOC.read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [HANDOFF, INTAKE, BRANCH], ids=lambda table: table.name)
def test_every_state_is_explained(table: TransitionTable) -> None:  # type: ignore[type-arg]
    rows = [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    explained = {line.split("`")[1] for line in rows}
    assert {state.value for state in table.arrows} <= explained
