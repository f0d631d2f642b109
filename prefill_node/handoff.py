"""One request's life on the prefill node: its states, its blocks, what has been computed and what sent.

Ownership: the handoff owns every block of ``block_table`` under its key's name, from admission until ``released``.
They are given back only when no step writes them and the transport no longer reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cluster.request import RequestKey, SamplingParams, TokenLogprobs, finish_reason
from cluster.transitions import Life, TransitionTable
from cluster.wire import Capsule, Commit, FirstToken, Party, PromptLogprobs, StartedChoice, Submit, Ticket, Token0
from engine.history import TokenHistory
from engine.instructions import Push
from engine.remembered import TRANSFER_SILENCE_S
from engine.step import SampledToken, SequenceChunk
from kvtransfer.regroup import Source, run_of
from kvtransfer.ticket import TransferTicket

# 20 likeliest tokens each make about 1.3 MB of so many.
MAX_LOGPROBS_A_MESSAGE = 4096
# A Commit, or the Acknowledged it is answered by, may have been lost: it is said again until one arrives.
COMMIT_AGAIN_S = 1.0


class HandoffState(Enum):
    """``ended``: every choice finished at token 0, nothing more is sent."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    SENDING = "sending"
    ACKNOWLEDGED = "acknowledged"
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RELEASED = "released"


HANDOFF = TransitionTable(
    "prefill handoff",
    HandoffState.QUEUED,
    {
        HandoffState.QUEUED: (HandoffState.PREFILLING, HandoffState.CANCELLED, HandoffState.FAILED),
        HandoffState.PREFILLING: (
            HandoffState.SENDING,
            HandoffState.ENDED,
            HandoffState.CANCELLED,
            HandoffState.FAILED,
        ),
        HandoffState.SENDING: (HandoffState.ACKNOWLEDGED, HandoffState.CANCELLED, HandoffState.FAILED),
        HandoffState.ACKNOWLEDGED: (HandoffState.RELEASED,),
        HandoffState.ENDED: (HandoffState.RELEASED,),
        HandoffState.CANCELLED: (HandoffState.RELEASED,),
        HandoffState.FAILED: (HandoffState.RELEASED,),
        HandoffState.RELEASED: (),
    },
)

# States in which the request still needs something from this node, and may fail or be cancelled.
ACTIVE = (HandoffState.QUEUED, HandoffState.PREFILLING, HandoffState.SENDING)
# States from which the only way on is to give everything back.
LEAVING = (HandoffState.ENDED, HandoffState.CANCELLED, HandoffState.FAILED)


@dataclass(slots=True)
class Handoff:
    """A request on the prefill node. Mutable, changed only by :class:`prefill_node.scheduler.PrefillState`.

    ``num_pushed`` and ``num_sent`` count blocks of the decode node's size, ``num_named`` those of this node's.
    """

    key: RequestKey
    router: Party
    prompt: tuple[int, ...]
    block_names: tuple[bytes, ...]
    sampling: SamplingParams
    num_emitted: int
    num_prompt_logprobs: int | None
    ticket: Ticket | None
    transfer: TransferTicket | None
    deadline_s: float
    queued_s: float
    life: Life[HandoffState]
    started_s: float = 0.0
    progress_s: float = 0.0
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    num_named: int = 0
    num_pushed: int = 0
    num_sent: int = 0
    push_open: bool = False
    cancel_asked: bool = False
    blocks_sent: int = 0
    askers: list[Party] = field(default_factory=list)
    history: TokenHistory | None = None
    commit: Commit | None = None
    committed_s: float = 0.0

    @classmethod
    def queued(cls, router: Party, submit: Submit, transfer: TransferTicket | None, now: float) -> Handoff:
        """A request that has just been submitted; it holds no block yet."""
        return cls(
            key=submit.key,
            router=router,
            prompt=submit.prompt_token_ids,
            block_names=submit.block_hashes,
            sampling=submit.sampling,
            num_emitted=submit.num_emitted,
            num_prompt_logprobs=submit.num_prompt_logprobs,
            ticket=submit.ticket,
            transfer=transfer,
            deadline_s=now + submit.deadline_s,
            queued_s=now,
            life=Life(HANDOFF, now),
        )

    @property
    def owner(self) -> str:
        """The name under which this request owns blocks."""
        return str(self.key)

    @property
    def state(self) -> HandoffState:
        """Where in its life it is."""
        return self.life.state

    @property
    def active(self) -> bool:
        """True until the request is acknowledged or on its way out."""
        return self.state in ACTIVE

    @property
    def leaving(self) -> bool:
        """True while all that is left is to give everything back."""
        return self.state in LEAVING

    def is_late(self, now: float) -> bool:
        """True past the request's deadline, and if nothing moves any more though everything is computed."""
        silent = self.state is HandoffState.SENDING and now > self.progress_s + TRANSFER_SILENCE_S
        return silent or now > self.deadline_s

    def take_commit(self, now: float) -> Commit | None:
        """What the decode node must be told (again) by now."""
        if self.state is not HandoffState.SENDING or now < self.committed_s + COMMIT_AGAIN_S:
            return None
        self.committed_s = now
        return self.commit

    @property
    def num_remaining(self) -> int:
        """Prompt tokens not yet computed."""
        return len(self.prompt) - self.num_computed

    @property
    def in_step(self) -> bool:
        """True while a step that writes this request's blocks is being executed."""
        return self.num_scheduled > 0

    @property
    def decode(self) -> Party | None:
        """Who goes on with it; nobody if nothing is generated."""
        return None if self.ticket is None else self.ticket.decode

    @property
    def num_wanted(self) -> int:
        """First tokens to be drawn when the prompt is computed."""
        return 0 if self.sampling.prefill_only else self.sampling.num_choices

    @property
    def ends_at_token0(self) -> bool:
        """True if the length limit allows only token 0: no block need ever be sent."""
        return self.sampling.max_tokens - self.num_emitted <= 1

    def take_ready(self, block_size: int) -> Push | None:
        """The decode node's blocks complete since the last call, to be pushed now; its partial last one at the end.

        ``block_size`` is this node's. Only from blocks that no later chunk writes, so that what is being sent stays.
        """
        if self.ends_at_token0 or self.transfer is None or self.ticket is None:
            return None
        done, theirs = self.num_computed == len(self.prompt), self.ticket.block_size
        final = self.num_computed // block_size * block_size
        ready = -(-len(self.prompt) // theirs) if done else final // theirs
        if ready <= self.num_pushed:
            return None
        first = self.ticket.first_missing_token // theirs
        items = tuple((i - first, self._source(i, theirs, block_size)) for i in range(self.num_pushed, ready))
        used = len(self.prompt) % block_size
        self.push_open = True
        self.num_pushed = ready
        # What is cut out of blocks is cut at the token: only whole blocks have unused slots to hide.
        hide = done and used and theirs == block_size
        return Push(self.transfer, items, (self.block_table[-1], used) if hide else None)

    def _source(self, index: int, theirs: int, block_size: int) -> Source:
        """What goes into the decode node's block ``index`` of the prompt, of its size ``theirs``."""
        if theirs == block_size:
            return self.block_table[index]
        return run_of(self.block_table, index * theirs, min((index + 1) * theirs, len(self.prompt)), block_size)

    def next_chunk(self, count: int) -> SequenceChunk:
        """The next ``count`` prompt tokens; the last chunk samples token 0 of every choice (if any token is wanted),
        and only then the prompt is counted.
        """
        start, end = self.num_computed, self.num_computed + count
        last = end == len(self.prompt) and not self.sampling.prefill_only
        if last:
            self.history = TokenHistory.of_sequence(self.sampling, self.prompt, self.num_emitted)
        return SequenceChunk(
            key=self.key,
            token_ids=self.prompt[start:end],
            start=start,
            block_table=self.block_table,
            sampling=self.sampling if last else None,
            position=end,
            num_generated=self.num_emitted,
            history=self.history,
            output_token_ids=self._output() if last else (),
            targets=() if self.num_prompt_logprobs is None else self.prompt[start + 1 : end + 1],
            num_target_logprobs=self.num_prompt_logprobs or 0,
        )

    def prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> list[PromptLogprobs]:
        """What the router hears of the chunk that was computed last, in messages of bounded size."""
        start = self.num_computed + 1
        return [
            PromptLogprobs(self.key, start + first, logprobs[first : first + MAX_LOGPROBS_A_MESSAGE])
            for first in range(0, len(logprobs), MAX_LOGPROBS_A_MESSAGE)
        ]

    def token0(self, tokens: Sequence[SampledToken], now: float) -> Token0:
        """What the router hears when the prompt is computed; ``tokens`` has one for each choice, in order."""
        return Token0(
            key=self.key,
            choices=tuple(self._first_token(token) for token in tokens),
            cached_tokens=self.num_cached,
            queue_s=self.started_s - self.queued_s,
            prefill_s=now - self.started_s,
        )

    def _first_token(self, token: SampledToken) -> FirstToken:
        finish = finish_reason(self.sampling, token.token_id, self.num_emitted + 1)
        return FirstToken(token.choice, token.token_id, finish, token.logprobs)

    def capsule(self, token0: Token0) -> Capsule | None:
        """All the decode node needs besides the blocks; None if ``token0`` is the end of every choice."""
        going_on = [first for first in token0.choices if first.finish_reason is None]
        if not going_on or self.ticket is None:
            return None
        num_tail = len(self.prompt) % self.ticket.block_size
        return Capsule(
            prompt_len=len(self.prompt),
            choices=tuple(StartedChoice(first.choice, first.token_id) for first in going_on),
            num_emitted=self.num_emitted + 1,
            tail_token_ids=self.prompt[len(self.prompt) - num_tail :],
            sampling=self.sampling,
            penalty_counts=None if self.history is None else self.history.counts(),
            output_token_ids=self._output(),
        )

    def _output(self) -> tuple[int, ...]:
        """What was generated before token 0, if the request's options read it."""
        return self.prompt[len(self.prompt) - self.num_emitted :] if self.sampling.reads_output else ()

    def report(self) -> dict[str, str | int | float]:
        """One row of ``/debug/kv``."""
        return {
            "key": str(self.key),
            "state": self.state.value,
            "entered_s": self.life.entered_s,
            "deadline_s": self.deadline_s,
            "blocks": len(self.block_table),
            "router": self.router.id,
            "peer": "" if self.decode is None else self.decode.id,
        }
