"""One request's life on the decode node: its states, its blocks, what has arrived and who goes on from it.

Ownership: the intake owns ``block_table`` under its key's name until its first step; then its ``branches`` do, one for
each choice (:mod:`decode_node.branch`). Blocks that may still receive bytes go to quarantine
when the request ends early, and are freed only when the transport says that nothing can land any more.
``num_missing`` blocks have to be sent: the end of the prompt's blocks, those that were not found here.
``growth_left`` blocks are promised to it but not yet taken; the sum of promises never exceeds the free blocks, so a
running request can always grow. The promise holds for the capsule that :meth:`Intake.mismatch` lets through, no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.request import RequestKey, SamplingParams
from cluster.transitions import Life, TransitionTable
from cluster.wire import Capsule, Commit, Party, StartedChoice
from decode_node.branch import BRANCH, Branch
from engine.audit import Held
from engine.history import TokenHistory
from engine.remembered import TRANSFER_SILENCE_S


class IntakeState(Enum):
    """``cancelled`` and ``failed`` still hold quarantined blocks; ``freed`` holds nothing."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RUNNABLE = "runnable"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    FREED = "freed"


_ENDS = (IntakeState.CANCELLED, IntakeState.FAILED)
INTAKE = TransitionTable(
    "decode intake",
    IntakeState.RESERVED,
    {
        IntakeState.RESERVED: (IntakeState.RECEIVING, IntakeState.COMMITTED, *_ENDS),
        IntakeState.RECEIVING: (IntakeState.COMMITTED, *_ENDS),
        IntakeState.COMMITTED: (IntakeState.RUNNABLE, *_ENDS),
        IntakeState.RUNNABLE: (IntakeState.RUNNING, *_ENDS),
        IntakeState.RUNNING: (IntakeState.FINISHED, *_ENDS),
        IntakeState.FINISHED: (IntakeState.FREED,),
        IntakeState.CANCELLED: (IntakeState.FREED,),
        IntakeState.FAILED: (IntakeState.FREED,),
        IntakeState.FREED: (),
    },
)

ARRIVING = (IntakeState.RESERVED, IntakeState.RECEIVING, IntakeState.COMMITTED)
DECODING = (IntakeState.RUNNABLE, IntakeState.RUNNING)


@dataclass(slots=True)
class Intake:
    """A request on the decode node. Mutable, changed only by :class:`decode_node.scheduler.DecodeState`.

    ``choices`` are those still wanted that are no branches yet; ``num_freed`` counts blocks that its branches gave
    back, ``num_generated`` the tokens they generated.
    """

    key: RequestKey
    router: Party
    prefill: Party
    prompt_len: int
    seed_name: bytes
    block_names: tuple[bytes, ...]
    sampling: SamplingParams
    num_emitted: int
    ticket_id: int
    num_missing: int
    block_table: list[int]
    growth_left: int
    deadline_s: float
    life: Life[IntakeState]
    choices: list[int]
    progress_s: float = 0.0
    arrived: set[int] = field(default_factory=set)
    capsule: Capsule | None = None
    branches: list[Branch] = field(default_factory=list)
    num_freed: int = 0
    num_generated: int = 0
    quarantined: list[int] = field(default_factory=list)
    askers: list[Party] = field(default_factory=list)

    @property
    def owner(self) -> str:
        """The name under which this request owns blocks."""
        return str(self.key)

    @property
    def state(self) -> IntakeState:
        """Where in its life it is."""
        return self.life.state

    @property
    def active(self) -> bool:
        """True until the request has ended, one way or another."""
        return self.state in ARRIVING or self.state in DECODING

    def is_late(self, now: float) -> bool:
        """True if what has to arrive did not: in the request's time, or since Commit without a pause."""
        silent = self.state is IntakeState.COMMITTED and now > self.progress_s + TRANSFER_SILENCE_S
        return self.state in ARRIVING and (silent or now > self.deadline_s)

    @property
    def covered(self) -> bool:
        """True once every missing block has arrived exactly once."""
        return len(self.arrived) == self.num_missing

    @property
    def num_live(self) -> int:
        """Choices that are wanted and have not ended."""
        return len(self.choices) + sum(branch.generating for branch in self.branches)

    @property
    def in_step(self) -> bool:
        """True while a step that writes blocks of this request is being executed."""
        return any(branch.in_step for branch in self.branches)

    def holdings(self) -> dict[str, Held]:
        """All its blocks by the names of their owners: its own, and those of its branches."""
        held = {self.owner: Held(self.block_table, self.quarantined)}
        return held | {branch.owner: Held(branch.block_table) for branch in self.branches}

    def mismatch(self, sender: Party, commit: Commit, block_size: int) -> str | None:
        """Why ``commit`` cannot be for what was reserved here, or None."""
        capsule = commit.capsule
        if (sender.id, sender.epoch) != (self.prefill.id, self.prefill.epoch):
            return "the commit comes from another prefill node than was reserved for"
        if capsule.prompt_len != self.prompt_len or len(capsule.tail_token_ids) != self.prompt_len % block_size:
            return "the commit is for another prompt than was reserved for"
        if capsule.sampling != self.sampling or capsule.num_emitted != self.num_emitted + 1:
            return "the commit is for another number of tokens than was reserved for"
        if capsule.num_emitted >= self.sampling.max_tokens:
            return "the commit is for a request that has ended"
        if (capsule.penalty_counts is not None) != self.sampling.penalised:
            return "the commit and the request disagree about penalties"
        if len(capsule.output_token_ids) != (self.num_emitted if self.sampling.reads_output else 0):
            return "the commit does not tell the output that the request's options read"
        started = [each.choice for each in capsule.choices]
        asked = range(self.sampling.choice, self.sampling.choice + self.sampling.num_choices)
        if not started or started != sorted(set(started)) or started[0] not in asked or started[-1] not in asked:
            return "the commit starts choices that were not asked for"
        return None

    def start(self, capsule: Capsule) -> None:
        """Token 0 is known. Choices that it ended are not wanted any more."""
        self.capsule = capsule
        started = {each.choice for each in capsule.choices}
        self.choices = [choice for choice in self.choices if choice in started]

    def branch_out(self, growth: int, now: float) -> list[Branch]:
        """A branch for each choice, with ``growth`` blocks promised to each; their blocks are the table's to give."""
        if self.capsule is None:
            raise RuntimeError(f"{self.key} cannot branch out before its capsule is here")
        wanted, self.choices = set(self.choices), []
        of_choice = {sampling.choice: sampling for sampling in self.sampling.choices()}
        self.branches = [
            self._branch(self.capsule, started, of_choice[started.choice], growth, now)
            for started in self.capsule.choices
            if started.choice in wanted
        ]
        return self.branches

    def _branch(
        self, capsule: Capsule, started: StartedChoice, sampling: SamplingParams, growth: int, now: float
    ) -> Branch:
        history = TokenHistory.of_counts(capsule.penalty_counts)
        if history is not None:
            history.append(started.token0)
        return Branch(
            key=self.key,
            choice=started.choice,
            owner=self.owner if self.sampling.num_choices == 1 else f"{self.owner}/{started.choice}",
            sampling=sampling,
            block_table=[],
            growth_left=growth,
            num_generated=capsule.num_emitted,
            last_token=started.token0,
            context_len=self.prompt_len,
            parent_name=self.block_names[-1] if self.block_names else self.seed_name,
            life=Life(BRANCH, now),
            tail=list(capsule.tail_token_ids),
            history=history,
            output=[*capsule.output_token_ids, started.token0] if sampling.reads_output else [],
        )

    def report(self) -> dict[str, str | int | float]:
        """One row of ``/debug/kv``."""
        blocks = {block_id for held in self.holdings().values() for block_id in (*held.owned, *held.quarantined)}
        return {
            "key": str(self.key),
            "state": self.state.value,
            "entered_s": self.life.entered_s,
            "deadline_s": self.deadline_s,
            "blocks": len(blocks),
            "choices": self.num_live,
            "arrived": len(self.arrived),
            "missing": self.num_missing,
            "router": self.router.id,
            "peer": self.prefill.id,
        }
