"""Running a plan and sending its answer, whole or as a stream, until it ends or the client leaves.

One coroutine owns everything a request has running. No status line goes out before the first token or the
first error exists: an error is an ordinary response as long as it can be one, and an error frame after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import BatonError, EngineError
from router.choice import Choice
from router.completion import (
    DONE_FRAME,
    FORMATS,
    Piece,
    PromptTokensDetails,
    ReplyHead,
    Usage,
    error_frame,
)
from router.generation import Endings, Generation, Generator
from router.metrics import Metrics
from router.middleware import RECORD_KEY, RequestRecord, error_response
from router.planning import Plan
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ID_PREFIX: Final = {"completions": "cmpl", "chat": "chatcmpl"}
_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _SlowClientError(Exception):
    """The client has not read for longer than it may."""


class Answer(Response):
    """The response to one planned request; an ASGI application that runs once.

    It owns the plan's generations: each is closed when it finishes, when a sibling fails, when a stop string
    ends it and when the client disconnects, streaming or not.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        model: str,
        system_fingerprint: str | None,
        tokenizer: Tokenizer,
        generator: Generator,
        metrics: Metrics,
        send_timeout_s: float,
    ) -> None:
        super().__init__()
        head = ReplyHead(f"{_ID_PREFIX[plan.endpoint]}-{uuid.uuid4().hex}", int(time.time()), model, system_fingerprint)
        self._plan = plan
        self._format = FORMATS[plan.endpoint](head)
        self._generator = generator
        self._metrics = metrics
        self._send_timeout_s = send_timeout_s
        self._choices = [
            Choice(tokenizer.detokenizer(generation.prompt_token_ids), plan.stops, tokenizer.eos_token_ids)
            for generation in _by_choice(plan)
        ]
        self._pieces: list[list[Piece]] = [[] for _ in self._choices]
        self._started = False
        self._send_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD_KEY]
        async with asyncio.TaskGroup() as group:
            reply = group.create_task(self._reply(scope, receive, send, record))
            watcher = group.create_task(_cancel_on_disconnect(receive, reply, record))
            await asyncio.wait([reply])
            watcher.cancel()

    async def _reply(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        try:
            await self._run_all(send, record)
            await self._end(send)
        except _SlowClientError:
            record.outcome = "slow_client"  # returning without an end of body breaks the connection
        except BatonError as error:
            await self._fail(error, scope, receive, send, record)
        except Exception:
            logger.exception("request %s failed by a bug", record.client_id)
            await self._fail(EngineError("Internal error."), scope, receive, send, record)

    async def _run_all(self, send: Send, record: RequestRecord) -> None:
        if len(self._plan.generations) == 1:
            await self._run(0, send, record)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(self._plan.generations)):
                    group.create_task(self._run(number, send, record))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run(self, number: int, send: Send, record: RequestRecord) -> None:
        """Run one generation; its choices are those from ``number * n`` on."""
        generation, endings = self._plan.generations[number], Endings()
        indexes = range(number * generation.sampling.num_choices, (number + 1) * generation.sampling.num_choices)
        last_s: dict[int, float] = {}
        async with aclosing(self._generator.generate(generation, endings)) as deltas:
            async for delta in deltas:
                index, now_s = indexes[delta.choice], time.perf_counter()
                choice = self._choices[index]
                num_before = choice.num_tokens
                piece = choice.feed(delta)
                opening = b""
                if not last_s:
                    self._first_delta(generation, delta.cached_tokens, now_s - record.started_s)
                    opening = self._opening(indexes, generation)
                elif index in last_s:
                    self._metrics.inter_token_latency.observe(now_s - last_s[index])
                self._metrics.generation_tokens.inc(choice.num_tokens - num_before)
                if self._plan.stream:
                    await self._send_piece(send, index, piece, opening)
                else:
                    self._pieces[index].append(piece)
                last_s[index] = now_s
                if choice.finish_reason is not None:
                    if all(self._choices[each].finish_reason is not None for each in indexes):
                        return
                    if delta.finish_reason is None:
                        endings.add(delta.choice)
        raise EngineError("The answer ended without a reason.")

    def _first_delta(self, generation: Generation, cached_tokens: int | None, elapsed_s: float) -> None:
        self._metrics.time_to_first_token.observe(elapsed_s)
        self._metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
        self._metrics.cached_prompt_tokens.inc(cached_tokens or 0)

    def _opening(self, indexes: Sequence[int], generation: Generation) -> bytes:
        """What goes out before the first text of any of a generation's choices."""
        prompt_ids = generation.prompt_token_ids if self._plan.return_token_ids else None
        return b"".join(self._format.opening(index, prompt_ids) for index in indexes)

    async def _send_piece(self, send: Send, index: int, piece: Piece, opening: bytes) -> None:
        frames, with_ids = opening, self._plan.return_token_ids
        if piece.text or piece.finish_reason is not None or with_ids:
            usage = self._usage() if self._plan.usage == "every" else None
            frames += self._format.chunk(index, piece, usage, with_ids=with_ids)
        if frames:
            await self._send_frames(send, frames)

    async def _end(self, send: Send) -> None:
        if self._plan.stream:
            usage = b"" if self._plan.usage == "none" else self._format.usage_chunk(self._usage())
            await self._send_frames(send, usage + DONE_FRAME, more=False)
            return
        pieces = [_joined(pieces) for pieces in self._pieces]
        prompts = [generation.prompt_token_ids for generation in _by_choice(self._plan)]
        body = self._format.whole(pieces, self._usage(), prompts if self._plan.return_token_ids else None)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _fail(self, error: BatonError, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        record.outcome = "broken"
        try:
            await self._send_frames(send, error_frame(error) + DONE_FRAME, more=False)
        except _SlowClientError:
            record.outcome = "slow_client"

    async def _send_frames(self, send: Send, frames: bytes, *, more: bool = True) -> None:
        # Choices share the connection: without the lock one could write before another's status line is out.
        try:
            async with asyncio.timeout(self._send_timeout_s), self._send_lock:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS]})
                await send({"type": "http.response.body", "body": frames, "more_body": more})
        except TimeoutError:
            raise _SlowClientError from None

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(generation.prompt_token_ids) for generation in self._plan.generations)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        cached = [choice.cached_tokens for choice in self._choices if choice.cached_tokens is not None]
        details = PromptTokensDetails(sum(cached)) if cached else None
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def _by_choice(plan: Plan) -> list[Generation]:
    """The generation that each choice belongs to."""
    return [generation for generation in plan.generations for _ in range(generation.sampling.num_choices)]


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
    )


async def _cancel_on_disconnect(receive: Receive, reply: asyncio.Task[None], record: RequestRecord) -> None:
    """Wait for the client to leave; the body is read, so nothing else can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not reply.done():  # the end of a full answer is reported as a disconnect too
        record.outcome = "cancelled"
        reply.cancel()
