"""Running a plan and sending its answer, whole or as a stream, until it ends or the client leaves.

One coroutine owns everything a request has running. No status line goes out before the first token or the
first error exists: an error is an ordinary response as long as it can be one, and an error frame after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import BatonError, EngineError
from router.choice import Choice
from router.completion import DONE_FRAME, FORMATS, Piece, ReplyHead, error_frame, joined
from router.echo import echo_piece, moved, scores_piece
from router.generation import Endings, Generation, Generator, TokenDelta
from router.ids import new_id
from router.metrics import Metrics
from router.middleware import RECORD_KEY, RequestRecord, error_response
from router.patience import SendPatience
from router.planning import Plan
from router.replies import PromptTokensDetails, Usage
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ID_PREFIX: Final = {"completions": "cmpl", "chat": "chatcmpl"}
# Names and numbers of so many tokens take about 10 ms to write: more are written in a thread, and the event loop runs.
_INLINE_ENTRIES: Final = 1024
_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _Run:
    """One generation while it runs: ``indexes`` are its choices' numbers in the answer, ``running`` those that go on,
    ``last_s`` when each last got a token.
    """

    def __init__(self, number: int, indexes: range, started_s: float) -> None:
        self.number = number
        self.indexes = indexes
        self.started_s = started_s
        self.running = set(indexes)
        self.endings = Endings()
        self.last_s: dict[int, float] = {}


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
        answer_id = f"{_ID_PREFIX[plan.endpoint]}-{new_id()}"
        calls = plan.rules.calls
        head = ReplyHead(answer_id, int(time.time()), model, system_fingerprint, tokenizer, calls is not None)
        self._plan = plan
        shows_more = plan.return_token_ids or bool(plan.prompt_texts) or plan.usage == "every"
        self._streams_plain_text = plan.stream and not shows_more
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
        self._last_frames = b""  # they go out with the end
        self._started = False
        self._send_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD_KEY]
        async with asyncio.TaskGroup() as group:
            try:
                async with asyncio.timeout(None) as block:
                    watcher = group.create_task(_end_on_disconnect(receive, block, record))
                    with closing(SendPatience(self._send_timeout_s, block)) as self._patience:
                        await self._run_or_fail(scope, receive, send, record)
            except TimeoutError:  # returning without an end of body breaks the connection
                record.outcome = record.outcome or "slow_client"
            finally:
                watcher.cancel()

    async def _run_or_fail(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        try:
            await self._run_all(send, record)
            await self._end(send)
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
        """Run one generation to its end. What is there at the same time goes out at once."""
        generation = self._plan.generations[number]
        num_choices = generation.sampling.num_choices
        run = _Run(number, range(number * num_choices, (number + 1) * num_choices), record.started_s)
        async with aclosing(self._generator.generate(generation, run.endings)) as batches:
            async for deltas in batches:
                now_s, num_before = time.perf_counter(), self._num_tokens(run.indexes)
                frames = [await self._taken(run, group, now_s) for group in self._groups(deltas)]
                self._metrics.generation_tokens.inc(self._num_tokens(run.indexes) - num_before)
                if not run.running and len(self._plan.generations) == 1:
                    self._last_frames = b"".join(frames)
                elif any(frames):
                    await self._send_frames(send, b"".join(frames))
                if not run.running:
                    return
        raise EngineError("The answer ended without a reason.")

    def _groups(self, deltas: Sequence[TokenDelta]) -> list[list[TokenDelta]]:
        """Those that follow each other of one choice together; each alone if every chunk tells what is used so far."""
        if self._plan.usage == "every":
            return [[delta] for delta in deltas]
        return [list(group) for _choice, group in groupby(deltas, attrgetter("choice"))]

    async def _taken(self, run: _Run, deltas: Sequence[TokenDelta], now_s: float) -> bytes:
        """Take deltas of one choice that came at the same time; returns the frames that they let the client see."""
        index = run.indexes[deltas[0].choice]
        if index not in run.running:
            return b""  # a stop string has ended it just before
        plain = self._choices[index].feed_plain(deltas) if self._streams_plain_text else []
        pieces = self._generated(run.number, index, deltas[len(plain) :]) if len(plain) < len(deltas) else []
        opening = b""
        if not run.last_s:
            self._first_delta(self._plan.generations[run.number], deltas[0].cached_tokens, now_s - run.started_s)
            opening = await self._opening(run.number, run.indexes, deltas[0])
        self._observe_gaps(run, index, len(plain) + len(pieces), now_s)
        if pieces and pieces[-1].finish_reason is not None:
            run.running.remove(index)
            if deltas[len(plain) + len(pieces) - 1].finish_reason is None:
                run.endings.add(deltas[0].choice)
        if not self._plan.stream:
            self._pieces[index] += pieces
            return b""
        return opening + self._format.text_chunks(index, plain) + await self._chunks(index, pieces)

    def _observe_gaps(self, run: _Run, index: int, num_together: int, now_s: float) -> None:
        last_s = run.last_s.get(index)
        if last_s is not None:
            self._metrics.inter_token_latency.observe(now_s - last_s)
        if num_together > 1:
            self._metrics.inter_token_latency.observe(0.0, num_together - 1)
        run.last_s[index] = now_s

    def _first_delta(self, generation: Generation, cached_tokens: int | None, elapsed_s: float) -> None:
        self._metrics.time_to_first_token.observe(elapsed_s)
        self._metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
        self._metrics.cached_prompt_tokens.inc(cached_tokens or 0)

    def _generated(self, number: int, index: int, deltas: Sequence[TokenDelta]) -> list[Piece]:
        """What deltas add to their choice, up to its end."""
        plan, choice = self._plan, self._choices[index]
        pieces = choice.feed_all(deltas)
        if plan.prompt_texts:
            return [moved(piece, len(plan.prompt_texts[number])) for piece in pieces]
        return pieces

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

    async def _chunks(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """The frames of a choice's next pieces."""
        held, frames = self._pieces[index], list[bytes]()
        for piece in pieces:
            if self._streams_plain_text and piece.is_text and not held:
                frames.append(self._format.text_chunks(index, [piece.text]))
            else:
                held.append(piece)
                frames.append(await self._chunk(index))
        return b"".join(frames)

    async def _chunk(self, index: int) -> bytes:
        """What has gathered, if it shows anything; otherwise it goes with the next piece that does."""
        with_ids = self._plan.return_token_ids
        piece = joined(self._pieces[index])
        if not (piece.text or piece.calls or piece.finish_reason is not None or with_ids):
            return b""
        self._pieces[index].clear()
        usage = self._usage_so_far()
        if len(piece.entries) > _INLINE_ENTRIES:
            return await asyncio.to_thread(self._format.chunk, index, piece, usage, with_ids=with_ids)
        return self._format.chunk(index, piece, usage, with_ids=with_ids)

    async def _end(self, send: Send) -> None:
        if self._plan.stream:
            usage = b"" if self._plan.usage == "none" else self._format.usage_chunk(self._usage())
            await self._send_frames(send, self._last_frames + usage + DONE_FRAME, more=False)
            return
        pieces = [joined(pieces) for pieces in self._pieces]
        prompts = [generation.prompt_token_ids for generation in _by_choice(self._plan)]
        write = partial(self._format.whole, pieces, self._usage(), prompts if self._plan.return_token_ids else None)
        many = sum(piece.num_entries for piece in pieces) > _INLINE_ENTRIES
        body = await asyncio.to_thread(write) if many else write()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _fail(self, error: BatonError, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        record.outcome = "broken"
        await self._send_frames(send, error_frame(error) + DONE_FRAME, more=False)

    async def _send_frames(self, send: Send, frames: bytes, *, more: bool = True) -> None:
        # Choices share the connection: without the lock one could write before another's status line is out.
        async with self._send_lock:
            with self._patience:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS]})
                await send({"type": "http.response.body", "body": frames, "more_body": more})

    def _usage_so_far(self) -> Usage | None:
        return self._usage() if self._plan.usage == "every" else None

    def _num_tokens(self, indexes: range) -> int:
        return sum(self._choices[index].num_tokens for index in indexes)

    def _usage(self) -> Usage:
        prompt_tokens = sum(len(generation.prompt_token_ids) for generation in self._plan.generations)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        cached = [choice.cached_tokens for choice in self._choices if choice.cached_tokens is not None]
        details = PromptTokensDetails(sum(cached)) if cached else None
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def _by_choice(plan: Plan) -> list[Generation]:
    """The generation that each choice belongs to."""
    return [generation for generation in plan.generations for _ in range(generation.sampling.num_choices)]


async def _end_on_disconnect(receive: Receive, block: asyncio.Timeout, record: RequestRecord) -> None:
    """Wait for the client to leave; the body is read, so nothing else can arrive.

    Cancelled at once when the answer ends, whose end is reported as a disconnect too.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    if not block.expired():
        record.outcome = "cancelled"
        block.reschedule(asyncio.get_running_loop().time())
