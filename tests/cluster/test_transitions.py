"""The one door for state changes."""

from __future__ import annotations

from enum import Enum

import pytest

from cluster.transitions import IllegalTransitionError, Life, TransitionTable


class Light(Enum):
    RED = "red"
    GREEN = "green"
    BROKEN = "broken"


TABLE = TransitionTable(
    "traffic light",
    Light.RED,
    {Light.RED: (Light.GREEN, Light.BROKEN), Light.GREEN: (Light.RED,), Light.BROKEN: ()},
)


def test_a_life_remembers_its_moves() -> None:
    life = Life(TABLE, 1.0)
    life.move(Light.GREEN, 2.0)
    life.move(Light.RED, 3.0)
    assert (life.state, life.entered_s) == (Light.RED, 3.0)
    assert life.story == [(1.0, "red"), (2.0, "green"), (3.0, "red")]


def test_an_illegal_move_tells_the_story_and_changes_nothing() -> None:
    life = Life(TABLE, 1.0)
    life.move(Light.GREEN, 2.5)
    with pytest.raises(IllegalTransitionError, match=r"traffic light: green -> broken .* red@1.000 -> green@2.500"):
        life.move(Light.BROKEN, 3.0)
    assert (life.state, life.entered_s) == (Light.GREEN, 2.5)
    assert len(life.story) == 2


def test_nothing_follows_a_final_state() -> None:
    life = Life(TABLE, 0.0)
    assert not life.is_final
    life.move(Light.BROKEN, 1.0)
    assert life.is_final
    with pytest.raises(IllegalTransitionError):
        life.move(Light.RED, 2.0)


def test_staying_is_a_move_like_any_other() -> None:
    with pytest.raises(IllegalTransitionError):
        Life(TABLE, 0.0).move(Light.RED, 1.0)


def test_the_table_draws_itself() -> None:
    assert TABLE.mermaid().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> red",
        "    red --> green",
        "    red --> broken",
        "    green --> red",
        "    broken --> [*]",
    ]
