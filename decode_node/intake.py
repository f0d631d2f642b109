"""One request's life on the decode node: its states, its blocks, what has arrived and what was generated.

Ownership: the intake owns ``block_table`` under its key's name. Blocks that may still receive bytes go to quarantine
when the request ends early, and are freed only when the transport says that nothing can land any more.
``num_missing`` blocks have to be sent: the end of the prompt's blocks, those that were not found here.
``growth_left`` blocks are promised to it but not yet taken; the sum of promises never exceeds the free blocks, so a
running request can always grow. The promise holds for the capsule that :meth:`Intake.mismatch` lets through, no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.prefix_hash import child_hash
from cluster.request import RequestKey, SamplingParams
from cluster.transitions import Life, TransitionTable
from cluster.wire import Capsule, Commit, Party
from engine.history import TokenHistory
from engine.remembered import TRANSFER_SILENCE_S
from engine.step import SequenceChunk


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
    """A request on the decode node. Mutable, changed only by :class:`decode_node.scheduler.DecodeState`."""

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
    progress_s: float = 0.0
    arrived: set[int] = field(default_factory=set)
    capsule: Capsule | None = None
    num_generated: int = 0
    last_token: int = 0
    context_len: int = 0
    parent_name: bytes = b""
    tail: list[int] = field(default_factory=list)
    in_step: bool = False
    quarantined: list[int] = field(default_factory=list)
    askers: list[Party] = field(default_factory=list)
    history: TokenHistory | None = None

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
        return None

    def start(self, capsule: Capsule) -> None:
        """Set up decoding from token 0."""
        self.capsule = capsule
        self.num_generated = capsule.num_emitted
        self.last_token = capsule.token0
        self.context_len = self.prompt_len
        self.parent_name = self.block_names[-1] if self.block_names else self.seed_name
        self.tail = list(capsule.tail_token_ids)
        self.history = TokenHistory.of_counts(capsule.penalty_counts)

    def next_chunk(self) -> SequenceChunk:
        """The next decode step: store ``last_token``, choose the token after it."""
        return SequenceChunk(
            key=self.key,
            token_ids=(self.last_token,),
            start=self.context_len,
            block_table=self.block_table,
            sampling=self.sampling,
            position=self.context_len + 1,
            num_generated=self.num_generated,
            history=self.history,
        )

    def append(self, token_id: int, block_size: int) -> tuple[int, bytes] | None:
        """A step stored ``last_token`` and chose ``token_id``. Returns (block, its name) if it filled a block."""
        self.tail.append(self.last_token)
        self.context_len += 1
        self.num_generated += 1
        self.last_token = token_id
        if self.history is not None:
            self.history.append(token_id)
        if self.context_len % block_size:
            return None
        self.parent_name = child_hash(self.parent_name, self.tail)
        self.tail = []
        return self.block_table[self.context_len // block_size - 1], self.parent_name

    def report(self) -> dict[str, str | int | float]:
        """One row of ``/debug/kv``."""
        return {
            "key": str(self.key),
            "state": self.state.value,
            "entered_s": self.life.entered_s,
            "deadline_s": self.deadline_s,
            "blocks": len(self.block_table) + len(self.quarantined),
            "arrived": len(self.arrived),
            "missing": self.num_missing,
            "router": self.router.id,
            "peer": self.prefill.id,
        }
