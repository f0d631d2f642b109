"""One choice of a request while the decode node generates it: its place in the text, its blocks, its end.

Ownership: a branch owns every block of ``block_table`` in its own name, the prompt's full blocks together with the
other branches of its request. It gives them back alone, as soon as no step writes them; a block that others still hold
stays theirs. ``growth_left`` blocks are promised to it but not yet taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.prefix_hash import child_hash
from cluster.request import RequestKey, SamplingParams
from cluster.transitions import Life, TransitionTable
from engine.history import TokenHistory
from engine.step import SequenceChunk


class BranchState(Enum):
    """``dropped``: it ended because the router or its whole request did; it may still wait for the running step."""

    GENERATING = "generating"
    COMPLETE = "complete"
    DROPPED = "dropped"
    GONE = "gone"


BRANCH = TransitionTable(
    "decode branch",
    BranchState.GENERATING,
    {
        BranchState.GENERATING: (BranchState.COMPLETE, BranchState.DROPPED),
        BranchState.COMPLETE: (BranchState.GONE,),
        BranchState.DROPPED: (BranchState.GONE,),
        BranchState.GONE: (),
    },
)


@dataclass(slots=True)
class Branch:
    """A choice being generated. Mutable, changed only by the decode node's batch and table.

    ``sampling`` asks for this ``choice`` alone. ``tail`` are the tokens stored after the last full block, whose name is
    ``parent_name``. ``output`` are the tokens generated so far, kept if ``sampling`` reads them.
    """

    key: RequestKey
    choice: int
    owner: str
    sampling: SamplingParams
    block_table: list[int]
    growth_left: int
    num_generated: int
    last_token: int
    context_len: int
    parent_name: bytes
    life: Life[BranchState]
    tail: list[int] = field(default_factory=list)
    history: TokenHistory | None = None
    output: list[int] = field(default_factory=list)
    in_step: bool = False

    @property
    def generating(self) -> bool:
        """True until it has ended, one way or another."""
        return self.life.state is BranchState.GENERATING

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
            output_token_ids=self.output,
        )

    def append(self, token_id: int, block_size: int) -> tuple[int, bytes] | None:
        """A step stored ``last_token`` and chose ``token_id``. Returns (block, its name) if it filled a block."""
        self.tail.append(self.last_token)
        self.context_len += 1
        self.num_generated += 1
        self.last_token = token_id
        if self.history is not None:
            self.history.append(token_id)
        if self.sampling.reads_output:
            self.output.append(token_id)
        if self.context_len % block_size:
            return None
        self.parent_name = child_hash(self.parent_name, self.tail)
        self.tail = []
        return self.block_table[self.context_len // block_size - 1], self.parent_name
