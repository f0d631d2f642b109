"""Fixtures of the system tests: the oracle, and a check after each test that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.oracle import Oracle
from tests.system.prompts import make_prompts
from tests.system.stack import Stack, wait_for


@pytest.fixture(scope="session")
def oracle(demo_model_dir: Path) -> Oracle:
    return Oracle(demo_model_dir)


@pytest.fixture(scope="session")
def prompts(demo_model_dir: Path) -> list[list[int]]:
    return make_prompts(demo_model_dir)


@pytest.fixture
def nothing_left() -> Callable[[Stack], object]:
    """A context in which a stack serves, and after which it holds exactly what it held before."""

    @contextmanager
    def check(stack: Stack, *, sockets: bool = True) -> Iterator[None]:
        before, before_sockets = stack.holdings(), _settled_sockets(stack)
        yield
        wait_for("everything given back", lambda: _same(before, stack.holdings()))
        if sockets:
            wait_for("sockets closed", lambda: _same(before_sockets, stack.sockets()))

    return check


def _settled_sockets(stack: Stack) -> dict[str, int]:
    """Socket counts once they stand still: those of the last scrape are still closing when it returns."""
    seen: list[dict[str, int]] = []

    def still() -> bool:
        seen.append(stack.sockets())
        return len(seen) >= 5 and all(counts == seen[-1] for counts in seen[-5:])

    wait_for("sockets stand still", still)
    return seen[-1]


def _same(before: dict[str, object], after: dict[str, object]) -> bool:
    differences = {name: (before[name], after.get(name)) for name in before if before[name] != after.get(name)}
    if differences:
        print("not yet as before:", differences)
    return not differences
