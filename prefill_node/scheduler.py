"""The prefill node's decisions: admission, chunks under a token budget, what to push, when to let go. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cluster.errors import BatonError, DeadlineError, EngineError, NodeStateError, TransferError, WorkerLostError
from cluster.request import RequestKey
from cluster.wire import (
    Acknowledged,
    Cancel,
    Cancelled,
    Commit,
    Failed,
    NodeLoad,
    Party,
    PeerDown,
    Ping,
    Pong,
    Submit,
)
from engine.block_pool import BlockPool, BlockReport
from engine.instructions import (
    CancelPush,
    DropPeer,
    FinishPush,
    Instruction,
    MessageArrived,
    NodeEvent,
    Send,
    StepFinished,
    TransferProgress,
)
from engine.remembered import RouterWatch
from engine.step import SampledToken, SequenceChunk, StepPlan, StepResult
from kvtransfer.events import BlocksSent, PushEnded, PushFailed
from kvtransfer.ticket import TransferTicket
from prefill_node.admission import PrefillSettings, check_submit, open_ticket
from prefill_node.chunking import share_budget
from prefill_node.handoff import Handoff, HandoffState
from prefill_node.table import HandoffTable

log = logging.getLogger(__name__)


class PrefillState:
    """All requests on one prefill node; see :class:`engine.instructions.NodeState`."""

    def __init__(self, pool: BlockPool, settings: PrefillSettings) -> None:
        self._settings = settings
        self._table = HandoffTable(pool, settings.block_size)
        self._routers = RouterWatch()
        self._planned: list[tuple[Handoff, int]] = []
        self._out: list[Instruction] = []
        self._counters: dict[str, float] = {
            "prompt_tokens_total": 0,
            "prefill_computed_tokens_total": 0,
            "prefix_cached_tokens_total": 0,
            "handoffs_acknowledged_total": 0,
            "handoffs_ended_total": 0,
            "handoffs_cancelled_total": 0,
            "handoffs_failed_total": 0,
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
        """See :class:`engine.instructions.NodeState`; the budget is shared by :mod:`prefill_node.chunking`."""
        self._admit(now)
        active = self._table.in_state(HandoffState.PREFILLING)
        shares = share_budget([h.num_remaining for h in active], self._settings.max_batch_tokens)
        self._planned = [(handoff, share) for handoff, share in zip(active, shares, strict=True) if share]
        if not self._planned:
            return None
        return StepPlan(tuple(self._chunk(handoff, count) for handoff, count in self._planned))

    def tick(self, now: float) -> list[Instruction]:
        """Fail what is past its deadline, and what belongs to a router that fell silent."""
        for handoff in self._table:
            if handoff.is_late(now):
                self._fail(handoff, DeadlineError("the request's deadline passed on the prefill node"), now)
            elif handoff.decode is not None and (commit := handoff.take_commit(now)) is not None:
                self._out.append(Send(handoff.decode, commit))
        silent = self._routers.take_silent(now)
        for handoff in self._table:
            if handoff.router in silent:
                self._fail(handoff, NodeStateError("the router was not heard of for too long"), now)
        return self._take()

    def load(self) -> NodeLoad:
        """Waiting tokens are those not yet computed."""
        waiting = self._table.in_state(HandoffState.QUEUED)
        todo = [*waiting, *self._table.in_state(HandoffState.PREFILLING)]
        return NodeLoad(
            num_running=len(self._table) - len(waiting),
            num_waiting=len(waiting),
            waiting_tokens=sum(handoff.num_remaining for handoff in todo),
            free_blocks=self._table.pool.num_free,
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
        return [handoff.report() for handoff in self._table]

    # --- messages ---

    def _on_message(self, sender: Party, body: object, now: float) -> None:
        match body:
            case Submit():
                self._routers.heard(sender, now)
                self._on_submit(sender, body, now)
            case Acknowledged(key):
                self._on_acknowledged(key, now)
            case Cancel(key):
                handoff = self._table.get(key)
                if handoff is None:
                    self._table.bury(key)
                    self._out.append(Send(sender, Cancelled(key, blocks_freed=0, blocks_sent=0)))
                else:
                    self._cancel(handoff, sender, now)
            case Failed(key):
                if (handoff := self._table.get(key)) is not None:
                    self._cancel(handoff, None, now)
            case PeerDown(node_id, epoch):
                self._out.append(DropPeer(node_id, epoch))
                for handoff in self._table:
                    decode = handoff.decode
                    if decode is not None and (decode.id, decode.epoch) == (node_id, epoch):
                        error = WorkerLostError("the decode node was lost")
                        self._fail(handoff, error, now, decode_lost=True)
            case Ping(sequence):
                self._routers.heard(sender, now)
                self._out.append(Send(sender, Pong(sequence, self.load())))
            case _:
                log.warning("a prefill node does not take %s", type(body).__name__)

    def _on_submit(self, router: Party, submit: Submit, now: float) -> None:
        key = submit.key
        if self._table.get(key) is not None:
            log.warning("%s was submitted twice", key)
            return
        transfer = self._admissible(submit)
        if isinstance(transfer, BatonError):
            self._refuse(router, submit, transfer)
            return
        handoff = Handoff.queued(router, submit, transfer, now)
        self._table.add(handoff)
        num_blocks = 0 if submit.ticket is None else submit.ticket.num_blocks
        log.info("%s queued: %d prompt tokens, %d blocks to send", key, len(handoff.prompt), num_blocks)

    def _admissible(self, submit: Submit) -> TransferTicket | BatonError | None:
        """The opened ticket (None if no block is missing), or why this cannot be started."""
        if self._table.has_ended(submit.key):
            return NodeStateError("the request is over on the prefill node")
        if (refusal := check_submit(submit, self._settings)) is not None:
            return refusal
        try:
            transfer = open_ticket(submit)
        except TransferError as error:
            return error
        if transfer is not None and self._table.of_ticket(transfer.ticket_id) is not None:
            return TransferError("the ticket is in use by another request")
        return transfer

    def _refuse(self, router: Party, submit: Submit, error: BatonError) -> None:
        self._table.bury(submit.key)
        self._out.append(Send(router, Failed(submit.key, error.code, error.message)))
        if submit.ticket is not None:
            self._out.append(Send(submit.ticket.decode, Cancelled(submit.key, blocks_freed=0, blocks_sent=0)))

    def _on_acknowledged(self, key: RequestKey, now: float) -> None:
        handoff = self._table.get(key)
        if handoff is None or handoff.state is not HandoffState.SENDING:
            return
        handoff.life.move(HandoffState.ACKNOWLEDGED, now)
        self._counters["handoffs_acknowledged_total"] += 1
        self._try_release(handoff, now)

    # --- transfer reports ---

    def _on_transfer(self, report: object, now: float) -> None:
        match report:
            case BlocksSent(ticket_id, indexes):
                if (handoff := self._table.of_ticket(ticket_id)) is not None:
                    handoff.num_sent += len(indexes)
                    handoff.progress_s = now
                    self._try_release(handoff, now)
            case PushEnded(ticket_id, blocks_sent):
                if (handoff := self._table.of_ticket(ticket_id)) is not None:
                    handoff.push_open = False
                    handoff.blocks_sent = blocks_sent
                    self._try_release(handoff, now)
            case PushFailed(ticket_id, reason):
                # A chunk handed over before this report was read has opened the push anew: only PushEnded
                # says that nothing is read any more.
                if (handoff := self._table.of_ticket(ticket_id)) is not None:
                    self._fail(handoff, TransferError(f"KV blocks could not be sent: {reason}"), now)
            case _:
                pass

    # --- computing ---

    def _admit(self, now: float) -> None:
        """Start queued requests in order of arrival while slots and blocks last; none overtakes another."""
        num_active = len(self._table.in_state(HandoffState.PREFILLING))
        for handoff in self._table.in_state(HandoffState.QUEUED):
            if num_active >= self._settings.max_active or not self._table.take_blocks(handoff):
                return
            num_active += 1
            handoff.started_s = now
            handoff.life.move(HandoffState.PREFILLING, now)
            self._counters["prompt_tokens_total"] += len(handoff.prompt)
            self._counters["prefix_cached_tokens_total"] += handoff.num_cached

    def _chunk(self, handoff: Handoff, count: int) -> SequenceChunk:
        handoff.num_scheduled = count
        return handoff.next_chunk(count)

    def _on_step(self, result: StepResult, now: float) -> None:
        sampled: dict[RequestKey, list[SampledToken]] = {}
        for token in result.tokens:
            sampled.setdefault(token.key, []).append(token)
        failed = dict(result.failed)
        scored = {score.key: score.logprobs for score in result.scored}
        planned, self._planned = self._planned, []
        for handoff, count in planned:
            handoff.num_scheduled = 0
            if handoff.leaving:
                self._try_release(handoff, now)
                continue
            tokens = sampled.get(handoff.key, [])
            reason = failed.get(handoff.key)
            done = handoff.num_remaining == count
            if reason is None and done and len(tokens) != handoff.num_wanted:
                reason = "the engine gave no token for this request"
            if reason is not None:
                self._table.distrust(handoff)
                self._fail(handoff, EngineError(reason), now)
                continue
            for message in handoff.prompt_logprobs(scored.get(handoff.key, ())):
                self._out.append(Send(handoff.router, message))
            handoff.num_computed += count
            self._counters["prefill_computed_tokens_total"] += count
            self._table.name_full_blocks(handoff)
            if done:
                self._hand_over(handoff, tokens, now)
            else:
                self._push_ready(handoff)

    def _push_ready(self, handoff: Handoff) -> None:
        if (push := handoff.take_ready(self._settings.block_size)) is not None:
            self._out.append(push)

    def _hand_over(self, handoff: Handoff, tokens: Sequence[SampledToken], now: float) -> None:
        """Token 0 exists, one for each wanted choice: the router gets them at once, the decode node gets the capsule of
        the choices that go on. If none does, the request ends here.
        """
        token0 = handoff.token0(tokens, now)
        self._out.append(Send(handoff.router, token0))
        capsule, decode = handoff.capsule(token0), handoff.decode
        if capsule is None or decode is None:
            self._counters["handoffs_ended_total"] += 1
            self._leave(handoff, HandoffState.ENDED, now)
            return
        self._push_ready(handoff)
        handoff.commit = Commit(handoff.key, capsule)
        self._out.append(Send(decode, handoff.commit))
        handoff.life.move(HandoffState.SENDING, now)
        handoff.progress_s = handoff.committed_s = now

    # --- endings ---

    def _fail(self, handoff: Handoff, error: BatonError, now: float, *, decode_lost: bool = False) -> None:
        """End an active request with ``error``; what is not active is only hurried along.

        Once Commit is out the decode node speaks for the request, unless it is lost: it may have every block and
        be streaming already. It hears ``Cancelled`` from here, and fails the request if it cannot go on.
        """
        if not handoff.active:
            self._stop_push(handoff)
            return
        log.warning("%s failed: %s", handoff.key, error.message)
        if decode_lost or handoff.state is not HandoffState.SENDING:
            self._out.append(Send(handoff.router, Failed(handoff.key, error.code, error.message)))
        self._counters["handoffs_failed_total"] += 1
        self._leave(handoff, HandoffState.FAILED, now)

    def _cancel(self, handoff: Handoff, asker: Party | None, now: float) -> None:
        if asker is not None:
            handoff.askers.append(asker)
        if handoff.active:
            self._counters["handoffs_cancelled_total"] += 1
            self._leave(handoff, HandoffState.CANCELLED, now)

    def _leave(self, handoff: Handoff, end: HandoffState, now: float) -> None:
        handoff.life.move(end, now)
        self._stop_push(handoff)
        self._try_release(handoff, now)

    def _stop_push(self, handoff: Handoff) -> None:
        if handoff.push_open and handoff.transfer is not None and not handoff.cancel_asked:
            handoff.cancel_asked = True
            self._out.append(CancelPush(handoff.transfer.ticket_id))

    def _try_release(self, handoff: Handoff, now: float) -> None:
        """Give everything back once no step writes the blocks and the transport reads none of them."""
        acknowledged = handoff.state is HandoffState.ACKNOWLEDGED
        all_sent = not handoff.push_open or (
            handoff.ticket is not None and handoff.num_sent >= handoff.ticket.num_blocks
        )
        if handoff.in_step or not ((acknowledged and all_sent) or (handoff.leaving and not handoff.push_open)):
            return
        if acknowledged and handoff.push_open and handoff.transfer is not None:
            self._out.append(FinishPush(handoff.transfer.ticket_id))
        freed = self._table.release(handoff)
        ended = Cancelled(handoff.key, blocks_freed=freed, blocks_sent=handoff.blocks_sent)
        told = [*handoff.askers]
        if not acknowledged and handoff.decode is not None:
            told.append(handoff.decode)
        self._out.extend(Send(party, ended) for party in dict.fromkeys(told))
        handoff.life.move(HandoffState.RELEASED, now)
        log.info("%s released after %.3f s, %d blocks freed", handoff.key, now - handoff.queued_s, freed)

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out
