"""One door for state changes: a table of allowed arrows and a life that remembers its moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)


class IllegalTransitionError(Exception):
    """A move the table does not allow; the message holds the life's whole story. Always our bug."""


@dataclass(frozen=True, slots=True)
class TransitionTable(Generic[S]):
    """``arrows[state]`` are the states that may follow; a state without arrows is final."""

    name: str
    initial: S
    arrows: Mapping[S, tuple[S, ...]]

    def is_final(self, state: S) -> bool:
        """True if nothing follows ``state``."""
        return not self.arrows[state]

    def mermaid(self) -> str:
        """The table as a Mermaid state diagram (``docs/states.md`` is checked against it)."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial.value}"]
        for state, targets in self.arrows.items():
            lines.extend(f"    {state.value} --> {target.value}" for target in targets)
            if not targets:
                lines.append(f"    {state.value} --> [*]")
        return "\n".join(lines)


class Life(Generic[S]):
    """The current state of one thing under a table, with its history for error messages and logs."""

    __slots__ = ("_table", "entered_s", "state", "story")

    def __init__(self, table: TransitionTable[S], now: float) -> None:
        self._table = table
        self.state = table.initial
        self.entered_s = now
        self.story: list[tuple[float, str]] = [(now, table.initial.value)]

    @property
    def is_final(self) -> bool:
        """True once no move is possible any more."""
        return self._table.is_final(self.state)

    def move(self, target: S, now: float) -> None:
        """Enter ``target`` at time ``now`` (seconds). Raises :class:`IllegalTransitionError`."""
        if target not in self._table.arrows[self.state]:
            told = " -> ".join(f"{name}@{at:.3f}" for at, name in self.story)
            raise IllegalTransitionError(
                f"{self._table.name}: {self.state.value} -> {target.value} is not allowed; story: {told}"
            )
        self.state = target
        self.entered_s = now
        self.story.append((now, target.value))
