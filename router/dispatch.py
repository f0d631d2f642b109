"""One request's way through the cluster, as one coroutine: place, reserve, submit, relay, and clean up.

The order is the protocol's (``docs/journey.md``): a decode node grants room first, then the prefill node gets the
prompt with that ticket; token 0 comes from the prefill node, every later one from the decode node. Whatever ends
the coroutine early (an error, the client's going, a lost node) cancels both nodes, and the router remembers the
dispatch until they confirm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

from cluster.errors import (
    BatonError,
    DeadlineError,
    NoUsablePairError,
    OverloadedError,
    TransferError,
    WorkerLostError,
    error_from_wire,
)
from cluster.request import RequestId, RequestKey
from cluster.wire import Failed, Granted, PromptLogprobs, Refused, Reserve, Submit, Ticket, Token0, TokenItem
from router.generation import Endings, Generation, Readiness, TokenDelta
from router.ids import new_id
from router.mailbox import Mail, Mailbox, NodeLost, Switchboard
from router.naming import PromptNames
from router.placement import Placer
from router.policy import Booking, Demand
from router.queue import Turn, WaitingLine, Wanted
from router.relay import TokenOrder

log = logging.getLogger(__name__)

MAX_FAILURES = 2
_TIMER_SLACK_S = 0.001
# Retryable for the client, later; here the time is up or there is nothing to try.
_FINAL = (OverloadedError, NoUsablePairError, DeadlineError)


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Time limits in seconds: for D's answer to Reserve, until token 0, and between later tokens."""

    reserve_timeout_s: float = 5.0
    token0_timeout_s: float = 300.0
    token_timeout_s: float = 30.0


class Dispatcher:
    """The :class:`router.generation.Generator` that serves requests on prefill and decode nodes."""

    def __init__(self, switchboard: Switchboard, placer: Placer, line: WaitingLine, settings: DispatchSettings) -> None:
        self._switchboard = switchboard
        self._placer = placer
        self._line = line
        self._settings = settings

    def ready(self) -> Readiness:
        """See :class:`router.generation.Generator`."""
        return self._placer.readiness()

    def max_request_tokens(self) -> int | None:
        """See :class:`router.generation.Generator`."""
        return self._placer.max_request_tokens()

    def max_answer_tokens(self, prompt_len: int, num_choices: int) -> int | None:
        """See :class:`router.generation.Generator`."""
        return self._placer.max_answer_tokens(prompt_len, num_choices)

    async def generate(
        self, generation: Generation, endings: Endings | None = None
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        """Serve one request. A lost node before its first token: once more, on what is alive then."""
        job = _Job(generation, self._line.turn(), endings or Endings())
        failures = 0
        while True:
            emitted = False
            try:
                async with aclosing(self._attempt(job)) as batches:
                    async for deltas in batches:
                        emitted = True
                        yield deltas
                return
            except BatonError as error:
                failures += 1
                log.info("%s ended with %s: %s", job.request_id, error.code, error.message)
                if emitted or failures >= MAX_FAILURES or not error.retryable or isinstance(error, _FINAL):
                    raise
                job.turn = self._line.renew(job.turn)

    async def _attempt(self, job: _Job) -> AsyncGenerator[Sequence[TokenDelta], None]:
        booking, mailbox = await self._submit_somewhere(job)
        order = TokenOrder(job.generation.sampling)
        try:
            async with aclosing(self._relay(mailbox, booking, order)) as batches:
                async for deltas in batches:
                    yield deltas
                    for choice in job.endings.take():
                        self._drop(mailbox, job, order, choice)
        finally:
            self._switchboard.close(mailbox, cancel=not order.complete)
            self._give_back(booking)

    def _drop(self, mailbox: Mailbox, job: _Job, order: TokenOrder, choice: int) -> None:
        """The reader has ended a choice; the decode node need not go on with it. The last one ends the dispatch."""
        if order.drop(choice) and not order.over:
            self._switchboard.cancel_choice(mailbox, job.generation.sampling.choice + choice)

    async def _submit_somewhere(self, job: _Job) -> tuple[Booking, Mailbox]:
        """Wait in the line until a decode node grants room, and submit the prompt to the prefill node.

        If nothing is to be generated no decode node is asked.

        The booking and the mailbox are the caller's once this returns; until then they are given back here.
        """
        while True:
            booking = await self._line.wait(job.turn, job.wanted)
            if not self._placer.is_usable(booking.placement):  # lost since the line chose it
                self._give_back(booking)
                continue
            mailbox = self._switchboard.open(job.next_key(), booking.placement)
            cancel, keep = True, False
            try:
                if job.generation.sampling.prefill_only:
                    self._submit(mailbox, None, job)
                    keep = True
                    return booking, mailbox
                answer = await self._reserve(mailbox, job, booking)
                if isinstance(answer, Granted):
                    self._submit(mailbox, answer.ticket, job)
                    keep = True
                    return booking, mailbox
                cancel = False  # a refusal leaves nothing behind
                if answer.retry_after_s is None:
                    raise error_from_wire(answer.code, answer.reason)
            finally:
                if not keep:
                    self._switchboard.close(mailbox, cancel=cancel)
                    self._give_back(booking)

    def _pause(self, booking: Booking, refusal: Refused | None) -> None:
        """Leave the decode node alone for a while; the line goes on then, whether or not anything else happens."""
        pause_s = self._placer.refused(booking, refusal)
        asyncio.get_running_loop().call_later(pause_s + _TIMER_SLACK_S, self._line.pump)

    def _give_back(self, booking: Booking) -> None:
        self._placer.release(booking)
        self._line.pump()

    async def _reserve(self, mailbox: Mailbox, job: _Job, booking: Booking) -> Granted | Refused:
        placement = mailbox.placement
        seed, names = job.wanted.names.of(placement.fingerprint, placement.decode_block_size)
        self._switchboard.send(
            placement.decode,
            Reserve(
                key=mailbox.key,
                prefill=placement.prefill,
                prompt_len=job.wanted.demand.prompt_len,
                seed_hash=seed,
                block_hashes=names,
                sampling=job.generation.sampling,
                deadline_s=self._settings.token0_timeout_s,
            ),
        )
        try:
            message = await mailbox.next(self._settings.reserve_timeout_s, "the decode node did not answer")
        except DeadlineError as error:
            self._pause(booking, None)
            raise WorkerLostError(error.message) from error
        match message:
            case Granted():
                self._placer.granted(booking)
                self._line.pump()
                return message
            case Refused(_key, _reason, retry_after_s):
                if retry_after_s is not None:
                    self._pause(booking, message)
                return message
            case _:
                raise _failure(message)

    def _submit(self, mailbox: Mailbox, ticket: Ticket | None, job: _Job) -> None:
        placement = mailbox.placement
        _seed, names = job.wanted.names.of(placement.fingerprint, placement.prefill_block_size)
        self._switchboard.send(
            placement.prefill,
            Submit(
                key=mailbox.key,
                prompt_token_ids=job.generation.prompt_token_ids,
                block_hashes=names,
                sampling=job.generation.sampling,
                ticket=ticket,
                deadline_s=self._settings.token0_timeout_s,
                num_prompt_logprobs=job.generation.num_prompt_logprobs,
            ),
        )
        log.debug(
            "%s submitted to %s for %s",
            mailbox.key,
            placement.prefill.id,
            "nobody: nothing is generated" if ticket is None else placement.decode.id,
        )

    async def _relay(
        self, mailbox: Mailbox, booking: Booking, order: TokenOrder
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        """The tokens of all choices, each choice's in order; a gap is an error, never a silent cut."""
        deadline_s = time.monotonic() + self._settings.token0_timeout_s
        while not order.over:
            limit = self._settings.token_timeout_s if order.started else max(0.0, deadline_s - time.monotonic())
            messages = await mailbox.next_together(limit, "no token came in time")
            deltas, failure = self._deltas_of_all(messages, booking, order)
            if deltas:
                yield deltas
            if failure is not None:
                raise failure

    def _deltas_of_all(
        self, messages: Sequence[Mail], booking: Booking, order: TokenOrder
    ) -> tuple[list[TokenDelta], BatonError | None]:
        """The deltas of all messages up to the first that ends the dispatch, and the error if it is one."""
        deltas: list[TokenDelta] = []
        try:
            for message in messages:
                if isinstance(message, TokenItem):
                    if (delta := order.follow(message)) is not None:
                        deltas.append(delta)
                else:
                    deltas += self._deltas_of(message, booking, order)
                if deltas and deltas[-1].finish_reason is not None and order.over:
                    break
        except BatonError as error:
            return deltas, error
        return deltas, None

    def _deltas_of(self, message: Mail, booking: Booking, order: TokenOrder) -> Sequence[TokenDelta]:
        match message:
            case PromptLogprobs():
                return order.take(message)
            case Token0():
                self._placer.prefilled(booking)
                self._line.pump()
                return order.take(message)
            case NodeLost(party) if order.started and party == booking.placement.prefill:
                return ()  # the decode node knows whether it has all it needs, and says so if not
            case NodeLost(party) if not booking.num_choices and party == booking.placement.decode:
                return ()  # it has no part in this
            case _:
                raise _failure(message)


class _Job:
    """One request and the numbers of its dispatches."""

    def __init__(self, generation: Generation, turn: Turn, endings: Endings) -> None:
        prompt_len, sampling = len(generation.prompt_token_ids), generation.sampling
        if sampling.prefill_only:
            demand = Demand(prompt_len, prompt_len, num_choices=0)
        else:
            demand = Demand(prompt_len, prompt_len + sampling.max_tokens - 1, sampling.num_choices)
        self.request_id = RequestId(new_id())
        self.generation = generation
        self.endings = endings
        self.turn = turn
        self.wanted = Wanted(demand, PromptNames(generation.prompt_token_ids, generation.cache_salt))
        self._attempts = count(1)

    def next_key(self) -> RequestKey:
        """Every Reserve is a dispatch of its own: a message for an earlier one is dropped."""
        return RequestKey(self.request_id, next(self._attempts))


def _failure(message: object) -> BatonError:
    match message:
        case Failed(_key, code, text):
            return error_from_wire(code, text)
        case NodeLost():
            return WorkerLostError("a node that served this request was lost")
        case _:
            return TransferError("the nodes answered out of order")
