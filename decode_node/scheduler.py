"""The decode node's decisions: grants, coverage of arriving blocks, when a request may run, endings. Pure.

Continuous batching (:mod:`decode_node.batch`): requests join when all their blocks have arrived and the capsule is
here, and leave when their last choice has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.errors import BatonError, DeadlineError, EngineError, NodeStateError, TransferError, WorkerLostError
from cluster.request import RequestKey
from cluster.wire import (
    Acknowledged,
    Cancel,
    CancelChoice,
    Cancelled,
    Commit,
    Failed,
    Granted,
    NodeLoad,
    Party,
    PeerDown,
    Ping,
    Pong,
    Refused,
    Reserve,
    Ticket,
    Tokens,
)
from decode_node.batch import Batch
from decode_node.intake import ARRIVING, DECODING, Intake, IntakeState
from decode_node.reservation import DecodeSettings, NoRoom
from decode_node.table import IntakeTable
from engine.block_pool import BlockPool, BlockReport
from engine.instructions import (
    CompleteTransfer,
    DropPeer,
    Expect,
    Instruction,
    MessageArrived,
    NodeEvent,
    Send,
    StepFinished,
    TransferProgress,
    Withdraw,
)
from engine.remembered import RouterWatch
from engine.step import StepPlan, StepResult
from kvtransfer.events import BlocksArrived, ReceiveFailed, Withdrawn
from kvtransfer.ticket import Hello, TransferTicket, encode_ticket

log = logging.getLogger(__name__)


class DecodeState:
    """All requests on one decode node; see :class:`engine.instructions.NodeState`."""

    def __init__(
        self,
        pool: BlockPool,
        settings: DecodeSettings,
        party: Party,
        hello: Callable[[], Hello],
        new_ticket_id: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._party = party
        self._hello = hello
        self._table = IntakeTable(pool, settings, new_ticket_id)
        self._routers = RouterWatch()
        self._batch = Batch(self._table, settings.block_size)
        self._step = 0
        self._out: list[Instruction] = []
        self._counters: dict[str, float] = {
            "decode_computed_tokens_total": 0,
            "generated_tokens_total": 0,
            "decode_steps_total": 0,
            "prompt_blocks_shared_total": 0,
            "prompt_blocks_received_total": 0,
            "intakes_finished_total": 0,
            "intakes_cancelled_total": 0,
            "intakes_failed_total": 0,
            "intakes_refused_total": 0,
        }

    # --- the three calls of a node's loop ---

    def handle(self, event: NodeEvent, now: float) -> list[Instruction]:
        """See :class:`engine.instructions.NodeState`."""
        match event:
            case MessageArrived(sender, body):
                self._on_message(sender, body, now)
            case TransferProgress(report):
                self._on_transfer(report, now)
            case StepFinished(result):
                self._on_step(result, now)
        return self._take()

    def schedule(self, now: float) -> StepPlan | None:
        """See :class:`engine.instructions.NodeState`."""
        return self._batch.plan(now)

    def tick(self, now: float) -> list[Instruction]:
        """Fail what has not arrived in time, and what belongs to a router that fell silent."""
        for intake in self._table:
            if intake.is_late(now):
                self._fail(intake, DeadlineError("the KV blocks did not arrive before the deadline"), now)
        silent = self._routers.take_silent(now)
        for intake in self._table:
            if intake.router in silent and intake.active:
                self._fail(intake, NodeStateError("the router was not heard of for too long"), now)
        return self._take()

    def load(self) -> NodeLoad:
        """``num_running`` counts choices; ``free_blocks`` are those not yet promised to anyone."""
        decoding = self._table.decoding()
        return NodeLoad(
            num_running=sum(intake.num_live for intake in decoding),
            num_waiting=len(self._table) - len(decoding),
            free_blocks=self._table.pool.num_free - self._table.promised,
            total_blocks=self._table.pool.num_blocks,
        )

    def counters(self) -> dict[str, float]:
        """See :class:`engine.instructions.NodeState`."""
        return dict(self._counters)

    def check(self) -> tuple[BlockReport, ...]:
        """See :class:`engine.instructions.NodeState`."""
        return self._table.orphans()

    def report(self) -> list[dict[str, str | int | float]]:
        """See :class:`engine.instructions.NodeState`."""
        return [intake.report() for intake in self._table]

    # --- messages ---

    def _on_message(self, sender: Party, body: object, now: float) -> None:
        match body:
            case Reserve():
                self._routers.heard(sender, now)
                self._on_reserve(sender, body, now)
            case Commit(key):
                self._on_commit(sender, body, now)
            case Cancel(key):
                if (intake := self._table.get(key)) is None:
                    self._table.bury(key)
                    self._out.append(Send(sender, Cancelled(key, blocks_freed=0, blocks_sent=0)))
                else:
                    self._cancel(intake, sender, now)
            case CancelChoice(key, choice):
                if (intake := self._table.get(key)) is not None and intake.active:
                    self._drop(intake, choice, now)
            case Cancelled(key, _freed, blocks_sent):
                self._on_sender_done(key, blocks_sent, now)
            case PeerDown(node_id, epoch):
                self._out.append(DropPeer(node_id, epoch))
                for intake in self._table:
                    if (intake.prefill.id, intake.prefill.epoch) == (node_id, epoch) and intake.state in ARRIVING:
                        self._fail(intake, WorkerLostError("the prefill node was lost"), now)
            case Ping(sequence):
                self._routers.heard(sender, now)
                self._out.append(Send(sender, Pong(sequence, self.load())))
            case _:
                log.warning("a decode node does not take %s", type(body).__name__)

    def _on_reserve(self, router: Party, reserve: Reserve, now: float) -> None:
        key = reserve.key
        if self._table.get(key) is not None:
            log.warning("%s was reserved twice", key)
            return
        if self._table.has_ended(key):
            self._out.append(Send(router, Refused(key, "this dispatch is over on the decode node", None)))
            return
        intake = self._table.admit(router, reserve, now)
        if isinstance(intake, NoRoom):
            self._counters["intakes_refused_total"] += 1
            self._out.append(Send(router, Refused(key, intake.reason, intake.retry_after_s, intake.code)))
            return
        num_shared = len(intake.block_table) - intake.num_missing
        transfer = b""
        if intake.num_missing:
            handles = self._table.handles(intake)
            self._out.append(Expect(intake.ticket_id, handles, intake.prefill))
            transfer = encode_ticket(TransferTicket(intake.ticket_id, self._hello(), handles))
        ticket = Ticket(
            decode=self._party,
            fingerprint=self._settings.fingerprint,
            block_size=self._settings.block_size,
            first_missing_token=num_shared * self._settings.block_size,
            num_blocks=intake.num_missing,
            transfer=transfer,
        )
        self._out.append(Send(router, Granted(key, ticket)))
        log.info("%s reserved: %d blocks here, %d to come", key, num_shared, intake.num_missing)

    def _on_commit(self, sender: Party, commit: Commit, now: float) -> None:
        intake = self._table.get(commit.key)
        if intake is not None and intake.state in DECODING and sender == intake.prefill:
            self._out.append(Send(sender, Acknowledged(intake.key)))  # the first one was lost
        if intake is None or intake.state not in (IntakeState.RESERVED, IntakeState.RECEIVING):
            return
        if (mismatch := intake.mismatch(sender, commit, self._settings.block_size)) is not None:
            self._fail(intake, TransferError(mismatch), now)
            return
        self._table.start(intake, commit.capsule)
        intake.progress_s = now
        intake.life.move(IntakeState.COMMITTED, now)
        if not intake.choices:  # the router has ended all that P did not
            self._leave(intake, IntakeState.CANCELLED, now)
        self._try_run(intake, now)

    def _on_sender_done(self, key: RequestKey, blocks_sent: int, now: float) -> None:
        """The prefill node will send no more than ``blocks_sent``: the transfer ends early.

        It has told the router why, unless it had committed: from then on this node speaks for the request.
        """
        intake = self._table.get(key)
        if intake is None or intake.state in DECODING:
            return
        if intake.state is IntakeState.COMMITTED:
            self._fail(intake, TransferError("the prefill node gave up sending KV blocks"), now, blocks_sent)
        elif intake.state in ARRIVING:
            self._leave(intake, IntakeState.CANCELLED, now, blocks_sent)
        elif intake.quarantined:
            self._out.append(Withdraw(intake.ticket_id, blocks_sent))

    # --- arriving ---

    def _on_transfer(self, report: object, now: float) -> None:
        match report:
            case BlocksArrived(ticket_id, indexes):
                if (intake := self._table.of_ticket(ticket_id)) is not None and intake.state in ARRIVING:
                    self._on_arrived(intake, indexes, now)
            case ReceiveFailed(ticket_id, reason):
                if (intake := self._table.of_ticket(ticket_id)) is not None and intake.state in ARRIVING:
                    self._fail(intake, TransferError(f"KV blocks broke off: {reason}"), now)
            case Withdrawn(ticket_id):
                if (intake := self._table.of_ticket(ticket_id)) is not None:
                    if intake.state in ARRIVING:
                        self._fail(intake, TransferError("the KV plane gave up the transfer"), now)
                    self._free(intake, now)
            case _:
                pass

    def _on_arrived(self, intake: Intake, indexes: tuple[int, ...], now: float) -> None:
        if intake.arrived.intersection(indexes) or not all(0 <= i < intake.num_missing for i in indexes):
            self._fail(intake, TransferError("a KV block arrived twice or was not asked for"), now)
            return
        intake.arrived.update(indexes)
        intake.progress_s = now
        self._counters["prompt_blocks_received_total"] += len(indexes)
        if intake.state is IntakeState.RESERVED:
            intake.life.move(IntakeState.RECEIVING, now)
        self._try_run(intake, now)

    def _try_run(self, intake: Intake, now: float) -> None:
        """``committed -> runnable`` only if every token offset of the prompt is covered exactly once."""
        if intake.state is not IntakeState.COMMITTED or not intake.covered:
            return
        if intake.num_missing:
            self._out.append(CompleteTransfer(intake.ticket_id))
        self._table.arrived(intake)
        self._counters["prompt_blocks_shared_total"] += len(intake.block_table) - intake.num_missing
        self._out.append(Send(intake.prefill, Acknowledged(intake.key)))
        intake.life.move(IntakeState.RUNNABLE, now)

    # --- running ---

    def _on_step(self, result: StepResult, now: float) -> None:
        self._step += 1
        self._counters["decode_steps_total"] += 1
        progress = self._batch.finish(result, now)
        self._counters["decode_computed_tokens_total"] += progress.num_computed
        self._counters["generated_tokens_total"] += sum(len(theirs) for theirs in progress.items.values())
        for intake in progress.intakes:
            if intake.state is not IntakeState.RUNNING:
                self._free(intake, now)
            elif (reason := progress.failed.get(intake.key)) is not None:
                self._table.distrust(intake)
                self._fail(intake, EngineError(reason), now)
            elif not intake.branches:
                self._finish(intake, now)
        for router, theirs in progress.items.items():
            self._out.append(Send(router, Tokens(self._step, tuple(theirs))))

    # --- endings ---

    def _finish(self, intake: Intake, now: float) -> None:
        """Its last choice has ended."""
        intake.life.move(IntakeState.FINISHED, now)
        self._counters["intakes_finished_total"] += 1
        self._free(intake, now)

    def _drop(self, intake: Intake, choice: int, now: float) -> None:
        """The router has ended this choice; without any other the request is over."""
        self._table.drop(intake, choice, now)
        if intake.state is IntakeState.RUNNING and not intake.branches:
            self._finish(intake, now)
        elif intake.state is not IntakeState.RUNNING and not intake.choices:
            self._leave(intake, IntakeState.CANCELLED, now)

    def _fail(self, intake: Intake, error: BatonError, now: float, blocks_sent: int | None = None) -> None:
        log.warning("%s failed: %s", intake.key, error.message)
        self._out.append(Send(intake.router, Failed(intake.key, error.code, error.message)))
        self._leave(intake, IntakeState.FAILED, now, blocks_sent)

    def _cancel(self, intake: Intake, asker: Party | None, now: float) -> None:
        if asker is not None:
            intake.askers.append(asker)
        if intake.active:
            self._leave(intake, IntakeState.CANCELLED, now)

    def _leave(self, intake: Intake, end: IntakeState, now: float, blocks_sent: int | None = None) -> None:
        """End early. Blocks that bytes may still reach go to quarantine; the others are freed.

        ``blocks_sent`` is known if the prefill node has stopped already: then it need not be asked to.
        """
        arriving = intake.state in ARRIVING
        intake.life.move(end, now)
        self._counters[f"intakes_{end.value}_total"] += 1
        if arriving and intake.num_missing:
            self._table.quarantine(intake)
            self._out.append(Withdraw(intake.ticket_id, blocks_sent))
        if arriving and blocks_sent is None:
            self._out.append(Send(intake.prefill, Cancel(intake.key)))
        if not intake.quarantined:
            self._free(intake, now)

    def _free(self, intake: Intake, now: float) -> None:
        """Give everything back, unless a step still writes blocks of it."""
        if intake.in_step:
            return
        freed = self._table.free(intake, now)
        ended = Cancelled(intake.key, blocks_freed=freed, blocks_sent=0)
        self._out.extend(Send(asker, ended) for asker in dict.fromkeys(intake.askers))
        intake.life.move(IntakeState.FREED, now)
        log.info("%s freed: %d blocks, %d tokens generated here", intake.key, freed, intake.num_generated)

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out
