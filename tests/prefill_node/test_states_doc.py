"""docs/states.md shows the very tables that the nodes run by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.transitions import TransitionTable
from decode_node.branch import BRANCH
from decode_node.intake import INTAKE
from kvtransfer.session import RECEIVE, SEND
from prefill_node.handoff import HANDOFF

TABLES = [HANDOFF, INTAKE, BRANCH, SEND, RECEIVE]
ROOT = Path(__file__).parent.parent.parent
DOC = ROOT / "docs" / "states.md"
LONGEST_S = 30.0


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_diagram_is_the_table(table: TransitionTable) -> None:  # type: ignore[type-arg]
    assert f"```mermaid\n{table.mermaid()}\n```" in DOC.read_text(encoding="utf-8")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_is_explained(table: TransitionTable) -> None:  # type: ignore[type-arg]
    """In the rows below its own diagram, with a deadline unless nothing follows."""
    below = DOC.read_text(encoding="utf-8").split(table.mermaid())[1].split("```mermaid")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in below.splitlines() if line.startswith("| `")]
    deadlines = {row[1].strip("`"): row[-2] for row in rows}
    assert deadlines.keys() == {state.value for state in table.arrows}
    assert all(
        deadlines[state.value] for state in table.arrows if not table.is_final(state) and table in (SEND, RECEIVE)
    )


def test_no_timer_of_a_transfer_is_longer_than_the_document_says() -> None:
    sources = [
        *(ROOT / "kvtransfer").glob("*.py"),
        *(ROOT / "prefill_node").glob("*.py"),
        *(ROOT / "decode_node").glob("*.py"),
        ROOT / "engine" / "remembered.py",
        ROOT / "engine" / "node.py",
    ]
    timers = {
        f"{path.name}: {name}": float(seconds)
        for path in sources
        for name, seconds in re.findall(r"^(\w+_S)(?:: \w+)? = ([\d.]+)", path.read_text(), re.MULTILINE)
    }
    assert len(timers) > 10
    assert {name for name, seconds in timers.items() if seconds > LONGEST_S} == set()
