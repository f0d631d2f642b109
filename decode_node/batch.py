"""The running batch: one token of every choice that is being generated, step after step.

Requests join at the step after their last block and their capsule came, and fork there into their choices; choices
leave at the step that ends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.request import RequestKey, finish_reason
from cluster.wire import Party, TokenItem
from decode_node.branch import Branch, BranchState
from decode_node.intake import Intake, IntakeState
from decode_node.table import IntakeTable
from engine.step import BlockCopy, SampledToken, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step has brought: the new tokens of each router's requests, and the requests that were in it.

    ``failed`` says why some of them cannot go on; for those, and for requests that ended before the step did, there are
    no tokens.
    """

    items: Mapping[Party, list[TokenItem]]
    intakes: tuple[Intake, ...]
    failed: Mapping[RequestKey, str]
    num_computed: int


class Batch:
    """Plans steps and takes in their results. Ends choices, never requests: that is the scheduler's."""

    def __init__(self, table: IntakeTable, block_size: int) -> None:
        self._table = table
        self._block_size = block_size
        self._planned: list[tuple[Intake, Branch]] = []

    def plan(self, now: float) -> StepPlan | None:
        """One token of every choice that is ready, in order of arrival."""
        copies: list[BlockCopy] = []
        self._planned = []
        for intake in self._table.decoding():
            if intake.state is IntakeState.RUNNABLE:
                intake.life.move(IntakeState.RUNNING, now)
                copies += self._table.fork(intake, now)
            self._planned += [(intake, branch) for branch in intake.branches]
        if not self._planned:
            return None
        for _intake, branch in self._planned:
            self._table.grow(branch)
            branch.in_step = True
        return StepPlan(tuple(branch.next_chunk() for _intake, branch in self._planned), tuple(copies))

    def finish(self, result: StepResult, now: float) -> Progress:
        """The planned step has been executed: no block of it is being written any more."""
        planned, self._planned = self._planned, []
        sampled = {(token.key, token.choice): token for token in result.tokens}
        failed = dict(result.failed)
        tokens: list[SampledToken | None] = []
        for _intake, branch in planned:
            branch.in_step = False
            tokens.append(sampled.get((branch.key, branch.choice)))
            if tokens[-1] is None and branch.generating:
                failed.setdefault(branch.key, "the engine gave no token for this request")
        items: dict[Party, list[TokenItem]] = {}
        intakes: list[Intake] = []
        for (intake, branch), token in zip(planned, tokens, strict=True):
            if not intakes or intakes[-1] is not intake:
                intakes.append(intake)
            if not branch.generating:
                self._table.release(intake, branch, now)
            elif token is not None and intake.state is IntakeState.RUNNING and not (failed and intake.key in failed):
                items.setdefault(intake.router, []).append(self._advance(intake, branch, token, now))
        return Progress(items, tuple(intakes), failed, len(planned))

    def _advance(self, intake: Intake, branch: Branch, token: SampledToken, now: float) -> TokenItem:
        index = branch.num_generated
        intake.num_generated += 1
        if (filled := branch.append(token.token_id, self._block_size)) is not None:
            self._table.pool.name(*filled)
        finish = finish_reason(branch.sampling, token.token_id, branch.num_generated)
        if finish is not None:
            branch.life.move(BranchState.COMPLETE, now)
            self._table.release(intake, branch, now)
        logprobs = () if token.logprobs is None else (token.logprobs,)
        return TokenItem(intake.key, index, (token.token_id,), finish, logprobs, branch.choice)
