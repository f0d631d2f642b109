"""The objects that answers are made of, as they stand in JSON; ``/openapi.json`` is drawn from the same types."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cluster.request import FinishReason

# A conversation's answer may also end because its calls want an answer.
ChatFinishReason = FinishReason | Literal["tool_calls"]


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


class ErrorReply(msgspec.Struct):
    """The body of every refusal and failure."""

    error: ErrorBody


class CompletionLogprobs(msgspec.Struct):
    """Four lists of one length, an entry a token; ``text_offset`` counts characters of prompt and completion.

    The first token of an echoed prompt has no log-probability: null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens. ``bytes`` are the token's own, even where ``token`` shows U+FFFD."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """One generated token and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """An entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    """vLLM's: ``rank`` 1 is the likeliest of the vocabulary at that place."""

    logprob: float
    rank: int
    decoded_token: str


# By token id, in the order of the prompt; nothing comes before its first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation, or its next part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunction(msgspec.Struct):
    """Which function to call; ``arguments`` is a JSON object in a string, as the model wrote it."""

    name: str
    arguments: str


class MadeCall(msgspec.Struct):
    """A call that the client is to make; ``id`` goes back with what it returned."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """The answer to a conversation; no content if it is nothing but calls."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[MadeCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """More of a call's arguments; the name comes with the first part only."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct):
    """More of a call; ``index`` is its number in the message, the rest of what names it comes with the first part."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to a message; the role comes with the first chunk only."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The next part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class _Reply(msgspec.Struct, kw_only=True):
    """What every frame of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Usage | UnsetType = UNSET


class CompletionReply(_Reply, kw_only=True):
    """A completion, or one chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatReply(_Reply, kw_only=True):
    """A whole answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(_Reply, kw_only=True):
    """One chunk of the stream of an answer to a conversation."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ModelCard(msgspec.Struct):
    """A model that is served; ``max_model_len`` counts prompt and output tokens."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"
    parent: None = None


class ModelList(msgspec.Struct):
    """The models that are served; empty until nodes have been ready for the first time."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeReply(msgspec.Struct):
    """``count`` is the length of ``tokens``; ``token_strs`` only if asked for."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct):
    """The text of the tokens, special ones included."""

    prompt: str


class TokenizerInfo(msgspec.Struct):
    """What a client needs to build prompts itself; null where the model has no such token or no template."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    vocab_size: int
    max_model_len: int


class HealthReply(msgspec.Struct):
    """The HTTP server runs."""

    status: Literal["ok"] = "ok"


class ReadyReply(msgspec.Struct):
    """Whether a request sent now could be served, and why not."""

    ready: bool
    reason: str | UnsetType = UNSET


class VersionReply(msgspec.Struct):
    """The server's version."""

    version: str
