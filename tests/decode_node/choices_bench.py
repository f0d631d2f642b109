"""What tests of several choices have in common."""

from __future__ import annotations

from decode_bench import (
    DecodeBench,
    key,
    of_kind,
)

from cluster.wire import (
    Cancel,
    CancelChoice,
    Tokens,
)
from engine.instructions import Instruction
from engine.step import SampledToken, StepPlan, StepResult


def drop(bench: DecodeBench, choice: int) -> list[Instruction]:
    return bench.message(CancelChoice(key(), choice))


def cancel(bench: DecodeBench) -> list[Instruction]:
    return bench.message(Cancel(key()))


def finish_each(bench: DecodeBench, plan: StepPlan, tokens: dict[int, int]) -> list[Instruction]:
    """Every planned choice gets the token that ``tokens`` has for it."""
    planned = [chunk.sampling.choice for chunk in plan.chunks if chunk.sampling is not None]
    return bench.finish_with(StepResult(tuple(SampledToken(key(), tokens[i], choice=i) for i in planned), (), 0.1))


def items_of(out: list[Instruction]) -> list[tuple[int, int, tuple[int, ...], str | None]]:
    items = [item for tokens in of_kind(out, Tokens) for item in tokens.items]
    return [(item.choice, item.index, item.token_ids, item.finish_reason) for item in items]


def row(bench: DecodeBench) -> dict[str, object]:
    (found,) = bench.state.report()
    return dict(found)
