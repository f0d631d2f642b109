"""Prefill and decode nodes without engines: real channels, scripted answers, and a memory of what they hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from cluster.channel import Channel
from cluster.config import ClusterConfig, new_epoch
from cluster.envelope import Envelope
from cluster.membership import NodeRecord, Role
from cluster.request import FinishReason, RequestKey, SamplingParams
from cluster.wire import (
    Acknowledged,
    Cancel,
    CancelChoice,
    Cancelled,
    Capsule,
    Commit,
    Failed,
    FirstToken,
    Granted,
    Message,
    NodeLoad,
    Party,
    PeerDown,
    Ping,
    Pong,
    Refused,
    Reserve,
    StartedChoice,
    Submit,
    Ticket,
    Token0,
    TokenItem,
    Tokens,
)

FINGERPRINT = "layout"
BLOCK_SIZE = 4


def token(prompt: Iterable[int], index: int, choice: int = 0) -> int:
    """The fake model: what follows depends on prompt, position and choice, so that mixed-up answers show."""
    return (sum(prompt) * 31 + index + choice * 7_000) % 50_000


def first_tokens(submit: Submit) -> Token0:
    """Token 0 of every choice, as the fake model has it."""
    finish = _finish(submit.sampling, 0)
    choices = tuple(
        FirstToken(each.choice, token(submit.prompt_token_ids, 0, each.choice), finish)
        for each in submit.sampling.choices()
    )
    return Token0(submit.key, choices, 0, 0.0, 0.0)


class FakeNode:
    """Answers pings and cancels. ``muted`` kinds of messages are not sent; a ``deaf`` node hears nothing."""

    role: Role

    def __init__(
        self, name: str, *, num_blocks: int = 64, fingerprint: str = FINGERPRINT, block_size: int = BLOCK_SIZE
    ) -> None:
        self.block_size = block_size
        self.config = ClusterConfig(name, new_epoch(), "redis://unused", "127.0.0.1", "127.0.0.1", None)
        self.channel = Channel(self.config)
        self.held: set[RequestKey] = set()
        self.got: list[Message] = []
        self.muted: set[type] = set()
        self.deaf = False
        self._num_blocks = num_blocks
        self._fingerprint = fingerprint
        self._running: asyncio.Task[None] | None = None

    @property
    def party(self) -> Party:
        return self.channel.party

    @property
    def record(self) -> NodeRecord:
        return NodeRecord(
            role=self.role,
            party=self.party,
            http_address="http://127.0.0.1:1",
            fingerprint=self._fingerprint,
            block_size=self.block_size,
            num_blocks=self._num_blocks,
            max_model_len=self._num_blocks * BLOCK_SIZE,
            transports=("tcp",),
        )

    def count(self, kind: type) -> int:
        """How many messages of that kind came."""
        return Counter(type(message) for message in self.got)[kind]

    async def __aenter__(self) -> FakeNode:
        await self.channel.__aenter__()
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.channel.__aexit__(None, None, None)

    def send(self, peer: Party, message: Message) -> None:
        if type(message) not in self.muted:
            self.channel.send(peer, message)

    async def _run(self) -> None:
        while True:
            envelope = await self.channel.receive()
            if not self.deaf:
                self.got.append(envelope.body)
                self._on(envelope)

    def _on(self, envelope: Envelope) -> None:
        match envelope.body:
            case Ping(sequence):
                self.send(envelope.sender, Pong(sequence, NodeLoad(total_blocks=self._num_blocks)))
            case Cancel(key):
                self._forget(key)
                self.send(envelope.sender, Cancelled(key, 0, 0))
            case PeerDown():
                pass
            case body:
                self._on_message(envelope.sender, body)

    def _forget(self, key: RequestKey) -> None:
        self.held.discard(key)

    def _on_message(self, sender: Party, body: Message) -> None:
        raise NotImplementedError


class FakePrefill(FakeNode):
    """Computes nothing: token 0 and the commit go out at once, unless ``on_submit`` returns something else to say.

    ``on_submit`` returns messages for the router instead; an empty list is silence.
    """

    role = "prefill"

    def __init__(self, name: str, **options: int | str) -> None:
        super().__init__(name, **options)  # type: ignore[arg-type]
        self.on_submit: Callable[[Submit], list[Message] | None] = lambda _submit: None

    def _on_message(self, sender: Party, body: Message) -> None:
        match body:
            case Submit():
                self._on_submit(sender, body)
            case Acknowledged(key):
                self._forget(key)

    def _on_submit(self, router: Party, submit: Submit) -> None:
        self.held.add(submit.key)
        if (said := self.on_submit(submit)) is not None:
            for message in said:
                self.send(router, message)
                if isinstance(message, Failed):
                    self._forget(submit.key)
            return
        self.send(router, first_tokens(submit))
        if _finish(submit.sampling, 0) is not None:
            self._forget(submit.key)
            self.send(submit.ticket.decode, Cancelled(submit.key, 0, 0))
            return
        started = tuple(StartedChoice(first.choice, first.token_id) for first in first_tokens(submit).choices)
        capsule = Capsule(len(submit.prompt_token_ids), started, 1, submit.prompt_token_ids, submit.sampling)
        self.send(submit.ticket.decode, Commit(submit.key, capsule))


class FakeDecode(FakeNode):
    """Grants while it has room for ``max_tokens_held`` tokens, then streams one token a step.

    ``on_reserve`` may return an answer of its own, or an empty list for silence. ``stop_after`` tokens a stream stands
    still; ``skip_token`` is left out of every stream.
    """

    role = "decode"

    def __init__(self, name: str, **options: int | str) -> None:
        super().__init__(name, **options)  # type: ignore[arg-type]
        self.on_reserve: Callable[[Reserve], list[Message] | None] = lambda _reserve: None
        self.max_tokens_held = self._num_blocks * BLOCK_SIZE
        self.stop_after: int | None = None
        self.skip_token: int | None = None
        self.granted: list[RequestKey] = []
        self.ended_choices: set[tuple[RequestKey, int]] = set()
        self._sizes: dict[RequestKey, int] = {}
        self._streams: dict[RequestKey, asyncio.Task[None]] = {}
        self._routers: dict[RequestKey, Party] = {}

    async def __aexit__(self, *error: object) -> None:
        for stream in self._streams.values():
            stream.cancel()
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        await super().__aexit__(*error)

    def _on_message(self, sender: Party, body: Message) -> None:
        match body:
            case Reserve():
                self._on_reserve(sender, body)
            case Commit(key, capsule) if key in self.held:
                self.send(sender, Acknowledged(key))
                self._streams[key] = asyncio.create_task(self._stream(key, capsule))
            case Cancelled(key):
                self._forget(key)
            case CancelChoice(key, choice):
                self.ended_choices.add((key, choice))

    def _on_reserve(self, router: Party, reserve: Reserve) -> None:
        if (said := self.on_reserve(reserve)) is not None:
            for message in said:
                self.send(router, message)
            return
        size = reserve.prompt_len + reserve.sampling.max_tokens - 1
        if sum(self._sizes.values()) + size > self.max_tokens_held:
            self.send(router, Refused(reserve.key, "no room", 0.05))
            return
        self.held.add(reserve.key)
        self.granted.append(reserve.key)
        self._sizes[reserve.key] = size
        self._routers[reserve.key] = router
        self.send(router, Granted(reserve.key, Ticket(self.party, FINGERPRINT, self.block_size, 0, 1, b"")))

    async def _stream(self, key: RequestKey, capsule: Capsule) -> None:
        index = 1
        while True:
            await asyncio.sleep(0)
            if self.stop_after is not None and index > self.stop_after:
                return
            finish = _finish(capsule.sampling, index)
            if index != self.skip_token:
                items = tuple(
                    TokenItem(key, index, (token(capsule.tail_token_ids, index, choice),), finish, choice=choice)
                    for choice in (each.choice for each in capsule.choices)
                    if (key, choice) not in self.ended_choices
                )
                self.send(self._routers[key], Tokens(index, items))
            if finish is not None:
                self._streams.pop(key, None)
                self._forget(key)
                return
            index += 1

    def _forget(self, key: RequestKey) -> None:
        super()._forget(key)
        self._sizes.pop(key, None)
        self._routers.pop(key, None)
        if (stream := self._streams.pop(key, None)) is not None:
            stream.cancel()


def _finish(sampling: SamplingParams, index: int) -> FinishReason | None:
    return "length" if index + 1 >= sampling.max_tokens else None
