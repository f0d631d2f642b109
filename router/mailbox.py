"""Messages find their request here: one mailbox a dispatch, and the memory of dispatches not yet confirmed ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from cluster.channel import Channel, ChannelError
from cluster.errors import DeadlineError, WorkerLostError
from cluster.request import RequestKey
from cluster.wire import (
    Cancel,
    CancelChoice,
    Cancelled,
    Failed,
    Granted,
    Message,
    Party,
    PromptLogprobs,
    Refused,
    Token0,
    TokenItem,
    Tokens,
)
from router.policy import Placement

log = logging.getLogger(__name__)

RESEND_S = 1.0
MAX_RESENDS = 30
# Of one dispatch handed over at once: a reader that has fallen behind must not own the event loop while it catches up.
MAX_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node this dispatch uses stopped answering."""

    party: Party


Said = Granted | Refused | PromptLogprobs | Token0 | TokenItem | Failed
Mail = Said | NodeLost


@dataclass(slots=True)
class Mailbox:
    """What the nodes say about one dispatch. Bounded by choices x ``max_tokens``: nodes send nothing unasked.

    ``dead`` are those of its nodes that will never confirm anything.
    """

    key: RequestKey
    placement: Placement
    dead: set[Party] = field(default_factory=set)
    _mail: deque[Mail] = field(default_factory=deque)
    _reader: asyncio.Future[bool] | None = None

    def put(self, mail: Mail) -> None:
        """Deliver."""
        self._mail.append(mail)
        if self._reader is not None:
            _settle(self._reader, True)
            self._reader = None

    async def next(self, limit_s: float, late: str) -> Mail:
        """The next message. Raises :class:`DeadlineError` saying ``late`` after ``limit_s`` seconds."""
        await self._some_mail(limit_s, late)
        return self._mail.popleft()

    async def next_together(self, limit_s: float, late: str) -> list[Mail]:
        """As :meth:`next`, and with it what else has come by now, in order."""
        await self._some_mail(limit_s, late)
        if len(self._mail) > MAX_TOGETHER:
            return [self._mail.popleft() for _ in range(MAX_TOGETHER)]
        together = list(self._mail)
        self._mail.clear()
        return together

    async def _some_mail(self, limit_s: float, late: str) -> None:
        # asyncio.timeout would cost more than all else that is done for a token.
        if self._mail:
            return
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        timer = loop.call_later(limit_s, _settle, reader, False)
        try:
            if not await reader:
                raise DeadlineError(late)
        finally:
            timer.cancel()
            self._reader = None


@dataclass(slots=True)
class _Ending:
    waiting_for: set[Party]
    sends: int = 0


class Switchboard:
    """Owns all mailboxes. Nothing of a dispatch is forgotten before both nodes confirmed its end (or are dead)."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: dict[RequestKey, Mailbox] = {}
        self._ending: dict[RequestKey, _Ending] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._ending)

    def report(self) -> list[dict[str, Any]]:
        """Every dispatch that is not over, or whose end some node has not confirmed yet."""
        running: list[dict[str, Any]] = [
            {
                "request": str(key),
                "state": "open",
                "prefill": box.placement.prefill.id,
                "decode": box.placement.decode.id,
            }
            for key, box in self._open.items()
        ]
        ending = [
            {"request": str(key), "state": "ending", "waiting_for": sorted(party.id for party in one.waiting_for)}
            for key, one in self._ending.items()
        ]
        return [*running, *ending]

    def open(self, key: RequestKey, placement: Placement) -> Mailbox:
        """A mailbox for a new dispatch."""
        mailbox = self._open[key] = Mailbox(key, placement)
        return mailbox

    def close(self, mailbox: Mailbox, *, cancel: bool) -> None:
        """The dispatch is over here; with ``cancel`` its nodes are told until they confirm."""
        del self._open[mailbox.key]
        if cancel:
            placement = mailbox.placement
            if waiting_for := {placement.prefill, placement.decode} - mailbox.dead:
                self._ending[mailbox.key] = _Ending(waiting_for)
                self._send_cancels(mailbox.key)

    def cancel_choice(self, mailbox: Mailbox, choice: int) -> None:
        """One choice is over here, the dispatch is not. Said once: :meth:`close` tells the decode node for sure."""
        decode = mailbox.placement.decode
        try:
            self._channel.send(decode, CancelChoice(mailbox.key, choice))
        except ChannelError as error:
            log.warning("%s: cannot end choice %d on %s: %s", mailbox.key, choice, decode.id, error)

    def send(self, party: Party, message: Message) -> None:
        """Send, or raise :class:`WorkerLostError` if the node takes no more messages."""
        try:
            self._channel.send(party, message)
        except ChannelError as error:
            log.warning("cannot reach %s: %s", party.id, error)
            raise WorkerLostError("a node that was to serve this request cannot be reached") from error

    def deliver(self, sender: Party, body: Message) -> None:
        """Sort one message from a node."""
        match body:
            case Tokens(_step, items):
                for item in items:
                    mailbox = self._open.get(item.key)
                    if mailbox is not None and sender == mailbox.placement.decode:
                        mailbox.put(item)
                    else:
                        self._put(item.key, sender, item)
            case Granted() | Refused() | PromptLogprobs() | Token0() | Failed():
                self._put(body.key, sender, body)
            case Cancelled(key):
                self._confirmed(key, sender)
            case _:
                log.warning("a router does not take %s", type(body).__name__)

    def lost(self, party: Party) -> None:
        """A node stopped answering: tell its dispatches."""
        for mailbox in list(self._open.values()):
            if party in (mailbox.placement.prefill, mailbox.placement.decode):
                mailbox.put(NodeLost(party))

    def dead(self, party: Party) -> None:
        """That life of that node is over: its confirmation will never come."""
        for mailbox in self._open.values():
            if party in (mailbox.placement.prefill, mailbox.placement.decode):
                mailbox.dead.add(party)
        for key in list(self._ending):
            self._confirmed(key, party)

    async def resend(self) -> None:
        """Repeat unconfirmed cancels until cancelled itself."""
        while True:
            await asyncio.sleep(RESEND_S)
            for key in list(self._ending):
                self._send_cancels(key)

    def _put(self, key: RequestKey, sender: Party, mail: Said) -> None:
        mailbox = self._open.get(key)
        if mailbox is None:
            self._put_late(key, sender, mail)
        elif sender not in _may_send(mail, mailbox.placement):
            log.warning("%s: %s from %s, whose part it is not", key, type(mail).__name__, sender.id)
        else:
            mailbox.put(mail)

    def _put_late(self, key: RequestKey, sender: Party, mail: object) -> None:
        """A message for a dispatch that is over here. If its node has not been told, it works for nobody."""
        goes_on = isinstance(mail, Granted) or (isinstance(mail, TokenItem) and mail.finish_reason is None)
        if goes_on and key not in self._ending:
            self._send_cancel(key, sender)

    def _confirmed(self, key: RequestKey, sender: Party) -> None:
        ending = self._ending.get(key)
        if ending is None:
            return
        ending.waiting_for.discard(sender)
        if not ending.waiting_for:
            del self._ending[key]

    def _send_cancels(self, key: RequestKey) -> None:
        ending = self._ending[key]
        ending.sends += 1
        if ending.sends > MAX_RESENDS:
            del self._ending[key]
            names = ", ".join(sorted(party.id for party in ending.waiting_for))
            log.error("%s: gave up waiting for the end on %s", key, names)
            return
        for party in ending.waiting_for:
            self._send_cancel(key, party)

    def _send_cancel(self, key: RequestKey, party: Party) -> None:
        try:
            self._channel.send(party, Cancel(key))
        except ChannelError as error:
            log.warning("%s: cannot cancel on %s: %s", key, party.id, error)


def _settle(reader: asyncio.Future[bool], has_mail: bool) -> None:
    if not reader.done():
        reader.set_result(has_mail)


def _may_send(mail: Said, placement: Placement) -> tuple[Party, ...]:
    match mail:
        case PromptLogprobs() | Token0():
            return (placement.prefill,)
        case Failed():
            return (placement.prefill, placement.decode)
        case _:
            return (placement.decode,)
