"""Drives a DecodeState by hand: events in, instructions out."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import count
from typing import TypeVar

from cluster.prefix_hash import block_hashes, seed_hash
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import Capsule, Commit, Message, Party, Reserve, StartedChoice
from decode_node.reservation import DecodeSettings
from decode_node.scheduler import DecodeState
from engine.block_pool import BlockPool
from engine.instructions import Instruction, MessageArrived, Send, StepFinished, TransferProgress
from engine.step import FailedSequence, SampledToken, StepPlan, StepResult
from kvtransfer.events import BlocksArrived, Event, Withdrawn
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.ticket import Hello

ROUTER = Party("R", 1, "tcp://127.0.0.1:1")
OTHER_ROUTER = Party("R2", 2, "tcp://127.0.0.1:9")
PREFILL = Party("P", 7, "tcp://127.0.0.1:2")
OTHER_PREFILL = Party("P2", 8, "tcp://127.0.0.1:4")
DECODE = Party("D", 3, "tcp://127.0.0.1:3")
BLOCK_SIZE = 4
SEED = seed_hash("layout")
KIND = TypeVar("KIND")
NONE: frozenset[int] = frozenset()
SETTINGS = DecodeSettings(block_size=BLOCK_SIZE, num_blocks=8, max_num_seqs=3, max_model_len=40, fingerprint="layout")


def key(name: str = "r") -> RequestKey:
    return RequestKey(RequestId(name), 1)


def hello() -> Hello:
    return Hello(
        version=WIRE_VERSION,
        node_id=DECODE.id,
        epoch=DECODE.epoch,
        fingerprint="layout",
        block_bytes=64,
        num_blocks=8,
        addresses={"inproc": b"x"},
        digest="sampled",
    )


def make_reserve(
    prompt: int | Sequence[int] = 10,
    *,
    name: str = "r",
    max_tokens: int = 5,
    num_emitted: int = 0,
    num_choices: int = 1,
    stop: tuple[int, ...] = (),
    deadline_s: float = 60.0,
) -> Reserve:
    token_ids = range(prompt) if isinstance(prompt, int) else prompt
    return Reserve(
        key=key(name),
        prefill=PREFILL,
        prompt_len=len(token_ids),
        seed_hash=SEED,
        block_hashes=block_hashes(SEED, token_ids, BLOCK_SIZE),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, num_choices=num_choices),
        deadline_s=deadline_s,
        num_emitted=num_emitted,
    )


def make_commit(
    reserve: Reserve, prompt: int | Sequence[int] = 10, token0: int = 100, ended: Set[int] = NONE
) -> Commit:
    """What P sends for ``reserve`` if token 0 was the end of the choices ``ended``; choice i begins with token0 + i."""
    token_ids = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    tail = token_ids[len(token_ids) // BLOCK_SIZE * BLOCK_SIZE :]
    started = tuple(StartedChoice(i, token0 + i) for i in range(reserve.sampling.num_choices) if i not in ended)
    capsule = Capsule(len(token_ids), started, reserve.num_emitted + 1, tail, reserve.sampling)
    return Commit(reserve.key, capsule)


def of_kind(instructions: Sequence[Instruction], kind: type[KIND]) -> list[KIND]:
    """Instructions or, for a message type, the messages of that type."""
    return [body for each in instructions if isinstance(body := getattr(each, "message", each), kind)]


def sent_to(instructions: Sequence[Instruction], party: Party) -> list[Message]:
    return [each.message for each in instructions if isinstance(each, Send) and each.peer == party]


class DecodeBench:
    """Ticket ids are 1, 2, 3 …"""

    def __init__(self, settings: DecodeSettings = SETTINGS) -> None:
        numbers = count(1)
        self.pool = BlockPool(settings.num_blocks)
        self.state = DecodeState(self.pool, settings, DECODE, hello, lambda: next(numbers))
        self.now = 100.0
        self.running: StepPlan | None = None

    def message(self, body: Message, sender: Party = ROUTER) -> list[Instruction]:
        return self._checked(self.state.handle(MessageArrived(sender, body), self.now))

    def reserve(self, prompt: int | Sequence[int] = 10, **options: object) -> list[Instruction]:
        return self.message(make_reserve(prompt, **options))  # type: ignore[arg-type]

    def commit(self, prompt: int | Sequence[int] = 10, token0: int = 100, **options: object) -> list[Instruction]:
        return self.message(make_commit(make_reserve(prompt, **options), prompt, token0), PREFILL)  # type: ignore[arg-type]

    def arrived(self, ticket_id: int, *indexes: int) -> list[Instruction]:
        return self.transfer(BlocksArrived(ticket_id, indexes))

    def withdrawn(self, ticket_id: int = 1) -> list[Instruction]:
        return self.transfer(Withdrawn(ticket_id))

    def transfer(self, event: Event) -> list[Instruction]:
        return self._checked(self.state.handle(TransferProgress(event), self.now))

    def make_runnable(self, ticket_id: int, prompt: int | Sequence[int] = 10, **options: object) -> list[Instruction]:
        """Reserve, all blocks, commit."""
        out = self.reserve(prompt, **options)
        num_missing = sum(row["missing"] for row in self.state.report() if row["state"] == "reserved")  # type: ignore[misc]
        if num_missing:
            out += self.arrived(ticket_id, *range(int(num_missing)))
        return out + self.commit(prompt, **options)

    def plan(self) -> StepPlan:
        plan = self.state.schedule(self.now)
        assert plan is not None
        self._checked([])
        for chunk in plan.chunks:
            written = chunk.block_table[chunk.start // BLOCK_SIZE]
            assert chunk.sampling is not None
            names = (str(chunk.key), f"{chunk.key}/{chunk.sampling.choice}")
            assert any(self.pool.is_writable(written, name) for name in names)
        return plan

    def finish(self, plan: StepPlan, token_id: int = 101, failed: Sequence[str] = ()) -> list[Instruction]:
        failures = tuple(FailedSequence(key(name), "the model's output is not finite") for name in failed)
        tokens = tuple(
            SampledToken(chunk.key, token_id, choice=chunk.sampling.choice)
            for chunk in plan.chunks
            if chunk.sampling is not None and chunk.key.request_id not in failed
        )
        return self.finish_with(StepResult(tokens, failures, 0.1))

    def finish_with(self, result: StepResult) -> list[Instruction]:
        return self._checked(self.state.handle(StepFinished(result), self.now))

    def step(self, token_id: int = 101) -> list[Instruction]:
        return self.finish(self.plan(), token_id)

    def tick(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self._checked(self.state.tick(self.now))

    def states(self) -> dict[str, str]:
        return {str(row["key"]): str(row["state"]) for row in self.state.report()}

    def _checked(self, instructions: list[Instruction]) -> list[Instruction]:
        self.pool.check_integrity()
        assert self.state.load().free_blocks >= 0, "more is promised than is free"
        return instructions
