"""Running a plan and sending its answer, whole or as a stream, until it ends or the client leaves.

One coroutine owns everything a request has running. No status line goes out before the first token or the
first error exists: an error is an ordinary response as long as it can be one, and an error frame after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import BatonError, EngineError
from router.choice import Choice
from router.completion import DONE_FRAME, FORMATS, Piece, ReplyHead, error_frame, joined
from router.echo import echo_piece, moved, scores_piece
from router.generation import Endings, Generation, Generator, TokenDelta
from router.metrics import Metrics
from router.middleware import RECORD_KEY, RequestRecord, error_response
from router.planning import Plan
from router.replies import PromptTokensDetails, Usage
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ID_PREFIX: Final = {"completions": "cmpl", "chat": "chatcmpl"}
# Names and numbers of so many tokens take about 10 ms to write.
_INLINE_ENTRIES: Final = 1024
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
        answer_id = f"{_ID_PREFIX[plan.endpoint]}-{uuid.uuid4().hex}"
        calls = plan.rules.calls
        head = ReplyHead(answer_id, int(time.time()), model, system_fingerprint, tokenizer, calls is not None)
        self._plan = plan
        self._format = FORMATS[plan.endpoint](head)
        self._tokenizer = tokenizer
        self._generator = generator
        self._metrics = metrics
        self._send_timeout_s = send_timeout_s
        self._choices = [
            Choice(
                tokenizer.detokenizer(
                    generation.prompt_token_ids,
                    show_special=plan.rules.show_special,
                    markers=() if calls is None else calls.written.markers,
                ),
                plan.rules,
                tokenizer.eos_token_ids,
            )
            for generation in _by_choice(plan)
        ]
        # What is not sent yet: all of a whole answer; of a stream what shows nothing by itself.
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
        running, last_s = set(indexes), dict[int, float]()
        async with aclosing(self._generator.generate(generation, endings)) as deltas:
            async for delta in deltas:
                index, now_s = indexes[delta.choice], time.perf_counter()
                num_before = self._choices[index].num_tokens
                piece = self._generated(number, index, delta)
                self._metrics.generation_tokens.inc(self._choices[index].num_tokens - num_before)
                opening = b""
                if not last_s:
                    self._first_delta(generation, delta.cached_tokens, now_s - record.started_s)
                    opening = await self._opening(number, indexes, delta)
                elif index in last_s:
                    self._metrics.inter_token_latency.observe(now_s - last_s[index])
                last_s[index] = now_s
                self._pieces[index].append(piece)
                if self._plan.stream and (frames := opening + await self._chunk(index)):
                    await self._send_frames(send, frames)
                if piece.finish_reason is not None:
                    running.remove(index)
                    if not running:
                        return
                    if delta.finish_reason is None:
                        endings.add(delta.choice)
        raise EngineError("The answer ended without a reason.")

    def _first_delta(self, generation: Generation, cached_tokens: int | None, elapsed_s: float) -> None:
        self._metrics.time_to_first_token.observe(elapsed_s)
        self._metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
        self._metrics.cached_prompt_tokens.inc(cached_tokens or 0)

    def _generated(self, number: int, index: int, delta: TokenDelta) -> Piece:
        """What a delta adds to its choice."""
        plan, choice = self._plan, self._choices[index]
        return moved(choice.feed(delta), len(plan.prompt_texts[number]) if plan.prompt_texts else 0)

    async def _opening(self, number: int, indexes: Sequence[int], first: TokenDelta) -> bytes:
        """What goes out before the first generated text of any of a generation's choices; all begin with an echo."""
        plan, generation = self._plan, self._plan.generations[number]
        if plan.echo:
            detokenizer = self._tokenizer.detokenizer(show_special=plan.rules.show_special)
            echoed = echo_piece(plan.prompt_texts[number], generation, first.prompt_logprobs, detokenizer)
            for index in indexes:
                self._pieces[index].append(echoed)
        if plan.num_prompt_logprobs is not None:
            scored = scores_piece(generation, first.prompt_logprobs, plan.num_prompt_logprobs)
            for index in indexes:
                self._pieces[index].append(scored)
        if not plan.stream:
            return b""
        prompt_ids = generation.prompt_token_ids if plan.return_token_ids else None
        usage = self._usage_so_far()
        frames = [self._format.opening(index, prompt_ids, usage) for index in indexes]
        if plan.echo:
            frames += [await self._chunk(index) for index in indexes]
        return b"".join(frames)

    async def _chunk(self, index: int) -> bytes:
        """What has gathered, if it shows anything; otherwise it goes with the next piece that does."""
        with_ids = self._plan.return_token_ids
        piece = joined(self._pieces[index])
        if not (piece.text or piece.calls or piece.finish_reason is not None or with_ids):
            return b""
        self._pieces[index].clear()
        write = partial(self._format.chunk, index, piece, self._usage_so_far(), with_ids=with_ids)
        return await _written(write, len(piece.entries))

    async def _end(self, send: Send) -> None:
        if self._plan.stream:
            usage = b"" if self._plan.usage == "none" else self._format.usage_chunk(self._usage())
            await self._send_frames(send, usage + DONE_FRAME, more=False)
            return
        pieces = [joined(pieces) for pieces in self._pieces]
        prompts = [generation.prompt_token_ids for generation in _by_choice(self._plan)]
        write = partial(self._format.whole, pieces, self._usage(), prompts if self._plan.return_token_ids else None)
        body = await _written(write, sum(piece.num_entries for piece in pieces))
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

    def _usage_so_far(self) -> Usage | None:
        return self._usage() if self._plan.usage == "every" else None

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(generation.prompt_token_ids) for generation in self._plan.generations)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        cached = [choice.cached_tokens for choice in self._choices if choice.cached_tokens is not None]
        details = PromptTokensDetails(sum(cached)) if cached else None
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def _by_choice(plan: Plan) -> list[Generation]:
    """The generation that each choice belongs to."""
    return [generation for generation in plan.generations for _ in range(generation.sampling.num_choices)]


async def _written(write: Callable[[], bytes], num_entries: int) -> bytes:
    """What ``write`` gives; in a thread, which lets the event loop run, if there is much to write."""
    return await asyncio.to_thread(write) if num_entries > _INLINE_ENTRIES else write()


async def _cancel_on_disconnect(receive: Receive, reply: asyncio.Task[None], record: RequestRecord) -> None:
    """Wait for the client to leave; the body is read, so nothing else can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not reply.done():  # the end of a full answer is reported as a disconnect too
        record.outcome = "cancelled"
        reply.cancel()
