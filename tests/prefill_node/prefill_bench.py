"""Drives a PrefillState by hand: events in, instructions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cluster.prefix_hash import block_hashes, seed_hash
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import Message, Party, Submit, Ticket
from engine.block_pool import BlockPool
from engine.instructions import Instruction, MessageArrived, Send, StepFinished, TransferProgress
from engine.step import FailedSequence, SampledToken, StepPlan, StepResult
from kvtransfer.events import BlocksSent, Event, PushEnded
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.ticket import BlockHandle, Hello, TransferTicket, encode_ticket
from prefill_node.admission import PrefillSettings
from prefill_node.scheduler import PrefillState

ROUTER = Party("R", 1, "tcp://127.0.0.1:1")
DECODE = Party("D", 7, "tcp://127.0.0.1:2")
OTHER_DECODE = Party("D2", 8, "tcp://127.0.0.1:3")
BLOCK_SIZE = 4
SEED = seed_hash("layout")
KIND = TypeVar("KIND")
SETTINGS = PrefillSettings(
    block_size=BLOCK_SIZE, num_blocks=8, max_batch_tokens=8, max_active=2, max_model_len=64, fingerprint="layout"
)


def key(name: str = "r") -> RequestKey:
    return RequestKey(RequestId(name), 1)


def hello(party: Party = DECODE) -> Hello:
    return Hello(
        version=WIRE_VERSION,
        node_id=party.id,
        epoch=party.epoch,
        fingerprint="layout",
        block_bytes=64,
        num_blocks=100,
        addresses={"inproc": b"x"},
        digest="sampled",
    )


def make_submit(
    prompt: int | Sequence[int] = 10,
    *,
    name: str = "r",
    first_missing: int = 0,
    max_tokens: int = 5,
    num_emitted: int = 0,
    stop: tuple[int, ...] = (),
    deadline_s: float = 60.0,
    ticket_id: int | None = None,
    decode: Party = DECODE,
) -> Submit:
    """A Submit whose ticket fits its prompt; tokens are 0, 1, 2 …, the ticket's id comes from ``name``."""
    token_ids = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    num_missing = -(-len(token_ids) // BLOCK_SIZE) - first_missing // BLOCK_SIZE
    number = ticket_id or ticket_of(name)
    handles = tuple(BlockHandle(i, 1) for i in range(num_missing))
    transfer = encode_ticket(TransferTicket(number, hello(decode), handles)) if handles else b""
    return Submit(
        key=key(name),
        prompt_token_ids=token_ids,
        block_hashes=block_hashes(SEED, token_ids, BLOCK_SIZE),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop),
        ticket=Ticket(decode, "layout", BLOCK_SIZE, first_missing, num_missing, transfer),
        deadline_s=deadline_s,
        num_emitted=num_emitted,
    )


def ticket_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") + 1


def of_kind(instructions: Sequence[Instruction], kind: type[KIND]) -> list[KIND]:
    """Instructions or, for a message type, the messages of that type."""
    return [body for each in instructions if isinstance(body := getattr(each, "message", each), kind)]


def sent_to(instructions: Sequence[Instruction], party: Party) -> list[Message]:
    return [each.message for each in instructions if isinstance(each, Send) and each.peer == party]


class PrefillBench:
    def __init__(self, settings: PrefillSettings = SETTINGS) -> None:
        self.pool = BlockPool(settings.num_blocks)
        self.state = PrefillState(self.pool, settings)
        self.now = 100.0
        self.running: StepPlan | None = None

    def message(self, body: Message, sender: Party = ROUTER) -> list[Instruction]:
        return self._checked(self.state.handle(MessageArrived(sender, body), self.now))

    def submit(self, prompt: int | Sequence[int] = 10, **options: object) -> list[Instruction]:
        return self.message(make_submit(prompt, **options))  # type: ignore[arg-type]

    def transfer(self, event: Event) -> list[Instruction]:
        return self._checked(self.state.handle(TransferProgress(event), self.now))

    def sent(self, name: str, *indexes: int) -> list[Instruction]:
        return self.transfer(BlocksSent(ticket_of(name), indexes))

    def push_ended(self, name: str = "r", blocks_sent: int = 0) -> list[Instruction]:
        return self.transfer(PushEnded(ticket_of(name), blocks_sent))

    def plan(self) -> StepPlan:
        plan = self.state.schedule(self.now)
        assert plan is not None
        self.pool.check_integrity()
        return plan

    def finish(self, plan: StepPlan, token_id: int = 9, failed: Sequence[str] = ()) -> list[Instruction]:
        """Every chunk that samples gets ``token_id``, except those that ``failed``."""
        failures = tuple(FailedSequence(key(name), "the model's output is not finite") for name in failed)
        tokens = tuple(
            SampledToken(chunk.key, token_id, choice=sampling.choice)
            for chunk in plan.chunks
            if chunk.sampling is not None and chunk.key.request_id not in failed
            for sampling in chunk.sampling.choices()
        )
        return self.finish_with(StepResult(tokens, failures, 0.1))

    def finish_with(self, result: StepResult) -> list[Instruction]:
        return self._checked(self.state.handle(StepFinished(result), self.now))

    def step(self, token_id: int = 9) -> list[Instruction]:
        return self.finish(self.plan(), token_id)

    def tick(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self._checked(self.state.tick(self.now))

    def states(self) -> dict[str, str]:
        return {str(row["key"]): str(row["state"]) for row in self.state.report()}

    def _checked(self, instructions: list[Instruction]) -> list[Instruction]:
        self.pool.check_integrity()
        return instructions
