"""OpenAI's answer objects, whole and as stream chunks, made from the text of each choice.

Two formats with one contract: text completions and chat. Both write the same ``id``, ``created``, ``model`` and
``system_fingerprint`` in every frame, finish each choice once, and put usage last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cluster.errors import BatonError
from cluster.request import FinishReason

DONE_FRAME: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """A choice's next text and the tokens it came from; ``stop_reason`` names a stop string or stop token id."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every frame of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, how many a prefix cache held: the prefill node's own count."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's token counts. All three are always there: clients pop them without asking."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class _Frame(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[Any]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class _Choice(msgspec.Struct, kw_only=True):
    index: int
    text: str | UnsetType = UNSET
    message: dict[str, str] | UnsetType = UNSET
    delta: dict[str, str] | UnsetType = UNSET
    logprobs: None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ReplyFormat(Protocol):
    """How one endpoint writes its answers. ``prompt_ids`` and ``with_ids`` serve ``return_token_ids``."""

    def whole(self, pieces: Sequence[Piece], usage: Usage, prompts: Sequence[tuple[int, ...]] | None) -> bytes:
        """The complete answer; one piece per choice, in order of index. ``prompts`` if ids were asked for."""
        ...

    def opening(self, index: int, prompt_ids: tuple[int, ...] | None) -> bytes:
        """What goes out before a choice's first text; may be empty."""
        ...

    def chunk(self, index: int, piece: Piece, usage: Usage | None, *, with_ids: bool) -> bytes:
        """One chunk of one choice."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last frame before ``[DONE]``: counts and no choices."""
        ...


class CompletionFormat:
    """``text_completion`` objects."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head

    def whole(self, pieces: Sequence[Piece], usage: Usage, prompts: Sequence[tuple[int, ...]] | None) -> bytes:
        choices = [
            _Choice(
                index=index,
                text=piece.text,
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=UNSET if prompts is None else piece.token_ids,
                prompt_token_ids=UNSET if prompts is None else prompts[index],
            )
            for index, piece in enumerate(pieces)
        ]
        return msgspec.json.encode(_frame(self._head, "text_completion", choices, usage))

    def opening(self, index: int, prompt_ids: tuple[int, ...] | None) -> bytes:
        if prompt_ids is None:
            return b""
        choice = _Choice(index=index, text="", finish_reason=None, token_ids=(), prompt_token_ids=prompt_ids)
        return _event(_frame(self._head, "text_completion", [choice]))

    def chunk(self, index: int, piece: Piece, usage: Usage | None, *, with_ids: bool) -> bytes:
        choice = _Choice(
            index=index,
            text=piece.text,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if with_ids else UNSET,
        )
        return _event(_frame(self._head, "text_completion", [choice], usage or UNSET))

    def usage_chunk(self, usage: Usage) -> bytes:
        return _event(_frame(self._head, "text_completion", [], usage))


class ChatFormat:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head

    def whole(self, pieces: Sequence[Piece], usage: Usage, prompts: Sequence[tuple[int, ...]] | None) -> bytes:
        choices = [
            _Choice(
                index=index,
                message={"role": "assistant", "content": piece.text},
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=UNSET if prompts is None else piece.token_ids,
            )
            for index, piece in enumerate(pieces)
        ]
        frame = _frame(self._head, "chat.completion", choices, usage)
        if prompts:
            frame.prompt_token_ids = prompts[0]
        return msgspec.json.encode(frame)

    def opening(self, index: int, prompt_ids: tuple[int, ...] | None) -> bytes:
        # The role comes once per choice: clients concatenate the strings of all deltas. The prompt comes once.
        choice = _Choice(index=index, delta={"role": "assistant", "content": ""}, finish_reason=None)
        frame = _frame(self._head, "chat.completion.chunk", [choice])
        if prompt_ids is not None and index == 0:
            frame.prompt_token_ids = prompt_ids
        return _event(frame)

    def chunk(self, index: int, piece: Piece, usage: Usage | None, *, with_ids: bool) -> bytes:
        choice = _Choice(
            index=index,
            delta={"content": piece.text} if piece.text else {},
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if with_ids else UNSET,
        )
        return _event(_frame(self._head, "chat.completion.chunk", [choice], usage or UNSET))

    def usage_chunk(self, usage: Usage) -> bytes:
        return _event(_frame(self._head, "chat.completion.chunk", [], usage))


FORMATS: Final[dict[Literal["completions", "chat"], type[CompletionFormat] | type[ChatFormat]]] = {
    "completions": CompletionFormat,
    "chat": ChatFormat,
}


def error_json(error: BatonError) -> bytes:
    """The body of a failed request."""
    body = ErrorBody(error.message, error.kind, error.param, error.code)
    return msgspec.json.encode({"error": body})


def error_frame(error: BatonError) -> bytes:
    """A failure after the first byte, in the one form that every client we know takes for an error.

    Some read the event's name, most the ``error`` object; one uses ``code`` as an HTTP status.
    """
    body = ErrorBody(error.message, error.kind, error.param, error.status)
    return b"event: error\ndata: " + msgspec.json.encode({"error": body}) + b"\n\n"


def _frame(head: ReplyHead, kind: str, choices: list[Any], usage: Usage | UnsetType = UNSET) -> _Frame:
    return _Frame(
        id=head.id,
        object=kind,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
        usage=usage,
    )


def _event(frame: _Frame) -> bytes:
    return b"data: " + msgspec.json.encode(frame) + b"\n\n"
