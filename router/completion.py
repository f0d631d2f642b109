"""OpenAI's answers, whole and as stream chunks, made from the text of each choice.

Two formats with one contract: text completions and chat. Both write the same ``id``, ``created``, ``model`` and
``system_fingerprint`` in every frame, finish each choice once, and put usage last.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cluster.errors import BatonError, EngineError
from cluster.request import FinishReason
from router.logprobs import PromptScores, TokenEntry, TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from router.replies import (
    AssistantMessage,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatReply,
    ChunkChoice,
    CompletionChoice,
    CompletionReply,
    Delta,
    ErrorBody,
    ErrorReply,
    FunctionDelta,
    MadeCall,
    PromptLogprobs,
    Usage,
)
from router.tool_calls import CallPart, whole_calls

DONE_FRAME: Final = b"data: [DONE]\n\n"
# Stands for a chunk's text where what is around it is learned; no model's name or id holds it.
_HOLE: Final = secrets.token_hex(16)
_encoder = msgspec.json.Encoder()


class Piece(msgspec.Struct, frozen=True):  # made in a tenth of a frozen dataclass's time, one a token
    """A choice's next text and the tokens it came from; ``stop_reason`` names a stop string or stop token id.

    ``entries`` has an entry a token if log-probabilities were asked for; an echoed prompt has entries and no
    ``token_ids``, which are generated ones. ``calls`` are what it adds to calls, and no part of ``text``; with
    ``ends_by_call`` the model has ended a choice with calls, and waits for what they return. ``scores`` are those of
    the prompt, if they are to be told apart from the text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    entries: tuple[TokenEntry, ...] = ()
    calls: tuple[CallPart, ...] = ()
    ends_by_call: bool = False
    scores: PromptScores | None = None

    @property
    def num_entries(self) -> int:
        """Of how many tokens names and numbers are to be written."""
        return len(self.entries) + (0 if self.scores is None else len(self.scores.logprobs))

    @property
    def is_text(self) -> bool:
        """True if it brings text and nothing else that a chunk shows."""
        return bool(self.text) and not (self.finish_reason or self.entries or self.calls)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
        entries=tuple(entry for piece in pieces for entry in piece.entries),
        calls=tuple(call for piece in pieces for call in piece.calls),
        ends_by_call=pieces[-1].ends_by_call,
        scores=next((piece.scores for piece in pieces if piece.scores is not None), None),
    )


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every frame of one answer repeats, and whose token names it uses.

    ``may_call`` if tools were offered: a first frame does not claim then that there is text.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    names: TokenNames
    may_call: bool = False


class ReplyFormat(Protocol):
    """How one endpoint writes its answers. ``prompt_ids`` and ``with_ids`` serve ``return_token_ids``."""

    def whole(self, pieces: Sequence[Piece], usage: Usage, prompts: Sequence[tuple[int, ...]] | None) -> bytes:
        """The complete answer; one piece per choice, in order of index. ``prompts`` if ids were asked for."""
        ...

    def opening(self, index: int, prompt_ids: tuple[int, ...] | None, usage: Usage | None) -> bytes:
        """What goes out before a choice's first text; may be empty."""
        ...

    def chunk(self, index: int, piece: Piece, usage: Usage | None, *, with_ids: bool) -> bytes:
        """One chunk of one choice, or more if it has several calls."""
        ...

    def text_chunks(self, index: int, texts: Iterable[str]) -> bytes:
        """The chunks of pieces that are nothing but text, without usage and ids: as :meth:`chunk` writes them, sooner.

        An empty text has no chunk.
        """
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last frame before ``[DONE]``: counts and no choices."""
        ...


class _TextChunks:
    """Chunks that bring nothing but text. All of a choice are alike around it, so that only the text is encoded."""

    def __init__(self, written: ReplyFormat) -> None:
        self._format = written
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def write(self, index: int, texts: Iterable[str]) -> bytes:
        """See :meth:`ReplyFormat.text_chunks`."""
        around = self._around.get(index)
        if around is None:
            example = self._format.chunk(index, Piece(_HOLE, ()), None, with_ids=False)
            before, _hole, after = example.partition(msgspec.json.encode(_HOLE))
            around = self._around[index] = before, after
        before, after = around
        written = (after + before).join(map(_encoder.encode, filter(None, texts)))
        return before + written + after if written else b""


class CompletionFormat:
    """``text_completion`` objects."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self.text_chunks = _TextChunks(self).write

    def whole(self, pieces: Sequence[Piece], usage: Usage, prompts: Sequence[tuple[int, ...]] | None) -> bytes:
        choices = [self._choice(index, piece, with_ids=prompts is not None) for index, piece in enumerate(pieces)]
        if prompts is not None:
            for choice in choices:
                choice.prompt_token_ids = prompts[choice.index]
        for choice, piece in zip(choices, pieces, strict=True):
            choice.prompt_logprobs = _prompt_logprobs(piece, self._head.names)
        return msgspec.json.encode(self._reply(choices, usage))

    def opening(self, index: int, prompt_ids: tuple[int, ...] | None, usage: Usage | None) -> bytes:
        if prompt_ids is None:
            return b""
        choice = CompletionChoice(index=index, text="", finish_reason=None, token_ids=(), prompt_token_ids=prompt_ids)
        return _event(self._reply([choice], usage))

    def chunk(self, index: int, piece: Piece, usage: Usage | None, *, with_ids: bool) -> bytes:
        return _event(self._reply([self._choice(index, piece, with_ids=with_ids)], usage))

    def usage_chunk(self, usage: Usage) -> bytes:
        return _event(self._reply([], usage))

    def _choice(self, index: int, piece: Piece, *, with_ids: bool) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=completion_logprobs(piece.entries, self._head.names) if piece.entries else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if with_ids else UNSET,
        )

    def _reply(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionReply:
        head = self._head
        return CompletionReply(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=UNSET if usage is None else usage,
        )


class ChatFormat:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self.text_chunks = _TextChunks(self).write

    def whole(self, pieces: Sequence[Piece], usage: Usage, prompts: Sequence[tuple[int, ...]] | None) -> bytes:
        head = self._head
        reply = ChatReply(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[self._choice(index, piece, with_ids=prompts is not None) for index, piece in enumerate(pieces)],
            usage=usage,
            prompt_token_ids=prompts[0] if prompts else UNSET,
            prompt_logprobs=_prompt_logprobs(pieces[0], head.names),
        )
        return msgspec.json.encode(reply)

    def opening(self, index: int, prompt_ids: tuple[int, ...] | None, usage: Usage | None) -> bytes:
        # The role comes once per choice: clients concatenate the strings of all deltas. The prompt comes once.
        choice = ChunkChoice(
            index=index, delta=Delta("assistant", None if self._head.may_call else ""), finish_reason=None
        )
        chunk = self._chunk([choice], usage)
        if prompt_ids is not None and index == 0:
            chunk.prompt_token_ids = prompt_ids
        return _event(chunk)

    def chunk(self, index: int, piece: Piece, usage: Usage | None, *, with_ids: bool) -> bytes:
        # openai's helper ends a call when a later frame brings another one, or the finish: each has its own frame.
        deltas = [Delta(content=piece.text)] if piece.text else []
        deltas += [Delta(tool_calls=[self._call_delta(index, call)]) for call in piece.calls]
        if not deltas or (piece.calls and piece.finish_reason is not None):
            deltas.append(Delta())
        *early, last = deltas
        choices = [ChunkChoice(index=index, delta=delta, finish_reason=None) for delta in early]
        choice = ChunkChoice(
            index=index,
            delta=last,
            logprobs=chat_logprobs(piece.entries, self._head.names) if piece.entries else None,
            finish_reason="tool_calls" if piece.ends_by_call else piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if with_ids else UNSET,
        )
        return b"".join(_event(self._chunk([one], usage)) for one in (*choices, choice))

    def usage_chunk(self, usage: Usage) -> bytes:
        return _event(self._chunk([], usage))

    def _choice(self, index: int, piece: Piece, *, with_ids: bool) -> ChatChoice:
        if piece.finish_reason is None:
            raise EngineError("The answer ended without a reason.")
        return ChatChoice(
            index=index,
            message=self._message(index, piece),
            logprobs=chat_logprobs(piece.entries, self._head.names) if piece.entries else None,
            finish_reason="tool_calls" if piece.ends_by_call else piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if with_ids else UNSET,
        )

    def _message(self, index: int, piece: Piece) -> AssistantMessage:
        if not piece.calls:
            return AssistantMessage("assistant", piece.text)
        calls = [
            MadeCall(self._call_id(index, call.index), CalledFunction(call.name, call.arguments))
            for call in whole_calls(piece.calls)
        ]
        return AssistantMessage("assistant", piece.text or None, calls)

    def _call_delta(self, index: int, part: CallPart) -> CallDelta:
        if part.name is None:
            return CallDelta(part.index, FunctionDelta(part.arguments))
        # Clients concatenate strings: what names the call comes once.
        return CallDelta(
            part.index, FunctionDelta(part.arguments, part.name), self._call_id(index, part.index), "function"
        )

    def _call_id(self, index: int, number: int) -> str:
        """Unique among all answers, and shorter than the 40 characters that OpenAI takes back."""
        return f"call_{self._head.id.rpartition('-')[2][:20]}{index:04x}{number:04x}"

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=UNSET if usage is None else usage,
        )


FORMATS: Final[dict[Literal["completions", "chat"], type[CompletionFormat] | type[ChatFormat]]] = {
    "completions": CompletionFormat,
    "chat": ChatFormat,
}


def error_json(error: BatonError) -> bytes:
    """The body of a failed request."""
    return msgspec.json.encode(ErrorReply(ErrorBody(error.message, error.kind, error.param, error.code)))


def error_frame(error: BatonError) -> bytes:
    """A failure after the first byte, in the one form that every client we know takes for an error.

    Some read the event's name, most the ``error`` object; one uses ``code`` as an HTTP status.
    """
    reply = ErrorReply(ErrorBody(error.message, error.kind, error.param, error.status))
    return b"event: error\n" + _event(reply)


def _prompt_logprobs(piece: Piece, names: TokenNames) -> PromptLogprobs | UnsetType:
    return UNSET if piece.scores is None else prompt_logprobs(piece.scores, names)


def _event(frame: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(frame) + b"\n\n"
