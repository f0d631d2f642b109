"""One node of the simulation: the real decisions, performed on a fake plane and a fake engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from fake_kv import FINGERPRINT, FakePlane, Memory

from cluster.request import FinishReason, SamplingParams, TokenLogprobs, finish_reason
from cluster.wire import Message, Party
from decode_node.reservation import DecodeSettings
from decode_node.scheduler import DecodeState
from engine.block_pool import BlockPool
from engine.instructions import (
    CancelPush,
    CompleteTransfer,
    DropPeer,
    Expect,
    FinishPush,
    Instruction,
    MessageArrived,
    NodeEvent,
    Push,
    Send,
    StepFinished,
    TransferProgress,
    Withdraw,
)
from engine.step import FailedSequence, SampledToken, SequenceChunk, StepPlan, StepResult
from kvtransfer.errors import KVTransferError
from kvtransfer.events import Event, PushFailed, ReceiveFailed
from kvtransfer.ticket import PeerId
from prefill_node.admission import PrefillSettings
from prefill_node.scheduler import PrefillState

BLOCK_SIZE = 4
NUM_BLOCKS = 14
MAX_MODEL_LEN = 40
VOCABULARY = 7
BEING_WRITTEN = -3


def next_token(
    token_ids: Sequence[int], sampling: SamplingParams, num_generated: int, counts: dict[int, int] | None
) -> int:
    """The "model": depends on every token before it, on how many are output, and on what penalties are told."""
    seen = None if counts is None else sorted(counts.items())
    digest = blake2b(
        repr((list(token_ids), sampling.seed, sampling.choice, num_generated, seen)).encode(), digest_size=4
    ).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def counts_of(sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> dict[int, int] | None:
    """What penalties must be told of a sequence."""
    if not sampling.penalised:
        return None
    known = {*prompt, *output} if sampling.repetition_penalty != 1.0 else set(output)
    return {token_id: output.count(token_id) for token_id in known}


def logprobs_of(sampling: SamplingParams, token_id: int) -> TokenLogprobs | None:
    return None if sampling.num_logprobs is None else TokenLogprobs(-float(token_id), ((token_id, -float(token_id)),))


def expected_answer(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    """What any correct cluster answers if one choice is asked for."""
    output: list[int] = []
    while True:
        counts = counts_of(sampling, prompt, output)
        output.append(next_token([*prompt, *output], sampling, len(output), counts))
        if (reason := finish_reason(sampling, output[-1], len(output))) is not None:
            return output, reason


class Node:
    """One life of a node. ``post`` sends a message, ``clock`` tells the time of the whole simulation."""

    def __init__(
        self,
        party: Party,
        role: str,
        post: Callable[[Party, Party, Message], None],
        clock: Callable[[], float],
        new_ticket_id: Callable[[], int],
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.party = party
        self.role = role
        self.block_size, num_blocks = block_size, NUM_BLOCKS * BLOCK_SIZE // block_size
        self.pool = BlockPool(num_blocks)
        self.memory = Memory(num_blocks, block_size)
        self.plane = FakePlane(PeerId(party.id, party.epoch), self.memory)
        self.plane.is_owned = lambda block_id: any(
            report.block_id == block_id and report.state == "owned" for report in self.pool.report()
        )
        self.news: deque[Event] = deque()
        self.plan: StepPlan | None = None
        self.idle = False
        self._post = post
        self._clock = clock
        self.state: PrefillState | DecodeState
        if role == "prefill":
            self.state = PrefillState(
                self.pool,
                PrefillSettings(
                    block_size=block_size,
                    num_blocks=num_blocks,
                    max_batch_tokens=7,
                    max_active=3,
                    max_model_len=MAX_MODEL_LEN,
                    fingerprint=FINGERPRINT,
                ),
            )
        else:
            self.state = DecodeState(
                self.pool,
                DecodeSettings(
                    block_size=block_size,
                    num_blocks=num_blocks,
                    max_num_seqs=4,
                    max_model_len=MAX_MODEL_LEN,
                    fingerprint=FINGERPRINT,
                ),
                party,
                self.plane.hello,
                new_ticket_id,
            )

    # --- the loop's calls, one at a time ---

    def receive(self, sender: Party, message: Message) -> None:
        self._take_in(MessageArrived(sender, message))

    def has_news(self) -> bool:
        self.news.extend(self.plane.poll())
        return bool(self.news)

    def read_news(self) -> None:
        """One event of the plane reaches the state."""
        self._take_in(TransferProgress(self.news.popleft()))

    def tick(self) -> None:
        self._perform(self.state.tick(self._clock()))

    def start_step(self) -> None:
        """Plan a step; from here on its blocks are being written. Without a plan the node sleeps until an event."""
        self.plan = self.state.schedule(self._clock())
        self.idle = self.plan is None
        for source, target in self.plan.copies if self.plan is not None else ():
            self.memory.blocks[target][:] = self.memory.blocks[source]
        for chunk in self.plan.chunks if self.plan is not None else ():
            self._check_chunk(chunk)
            for position in range(chunk.start, chunk.position):
                self.memory.write(chunk.block_table, position, BEING_WRITTEN)

    def finish_step(self, failing: Callable[[SequenceChunk], bool] = lambda _chunk: False) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        tokens, failed = [], []
        for chunk in plan.chunks:
            self._check_chunk(chunk)
            for offset, token_id in enumerate(chunk.token_ids):
                self.memory.write(chunk.block_table, chunk.start + offset, token_id)
            if failing(chunk):
                failed.append(FailedSequence(chunk.key, "the model's output is not finite"))
            elif chunk.sampling is not None:
                context = self.memory.read(chunk.block_table, chunk.position)
                assert min(context) >= 0, f"{chunk.key} attends to slots nobody wrote: {context}"
                history = chunk.history
                counts = None if history is None else dict(zip(*(a.tolist() for a in history.arrays()), strict=True))
                for each in chunk.sampling.choices():
                    token_id = next_token(context, each, chunk.num_generated, counts)
                    tokens.append(SampledToken(chunk.key, token_id, logprobs_of(each, token_id), each.choice))
        self._take_in(StepFinished(StepResult(tuple(tokens), tuple(failed), 0.0)))

    def _check_chunk(self, chunk: SequenceChunk) -> None:
        for index in range(chunk.start // self.block_size, -(-chunk.position // self.block_size)):
            block_id = chunk.block_table[index]
            names = [str(chunk.key)]
            if self.role == "decode" and chunk.sampling is not None:
                names.append(f"{chunk.key}/{chunk.sampling.choice}")
            assert any(self.pool.is_writable(block_id, name) for name in names), f"{chunk.key} writes block {block_id}"
            assert block_id not in self.plane.being_read(), f"{chunk.key} writes block {block_id} while it is sent"

    # --- as engine.node does it ---

    def _take_in(self, event: NodeEvent) -> None:
        self.idle = False
        self._perform(self.state.handle(event, self._clock()))

    def _perform(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            try:
                self._perform_one(instruction)
            except KVTransferError as error:
                match instruction:
                    case Push(ticket):
                        self._take_in(TransferProgress(PushFailed(ticket.ticket_id, str(error))))
                    case Expect(ticket_id):
                        self._take_in(TransferProgress(ReceiveFailed(ticket_id, str(error))))
                    case _:
                        raise

    def _perform_one(self, instruction: Instruction) -> None:
        plane = self.plane
        match instruction:
            case Send(peer, message):
                self._post(self.party, peer, message)
            case Push(ticket, items, zero_tail):
                if zero_tail is not None:
                    self.memory.zero_tail(*zero_tail)
                plane.push(ticket, items)
            case Expect(ticket_id, handles, sender):
                plane.receives.open(ticket_id, handles, PeerId(sender.id, sender.epoch))
            case CompleteTransfer(ticket_id):
                plane.receives.complete(ticket_id)
            case FinishPush(ticket_id):
                plane.sends.finish(ticket_id)
            case CancelPush(ticket_id):
                plane.sends.cancel(ticket_id)
            case Withdraw(ticket_id):
                plane.receives.withdraw(ticket_id)
            case DropPeer(node_id, epoch):
                plane.peer_dead(node_id, epoch)
