"""The two request bodies, decoded strictly: what a field may hold is written here and nowhere else.

Fields that the structs do not know are ignored, except those in the tables of options that would change the answer
if they were ignored. Errors name the field and the type wanted, never what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec

from cluster.errors import InvalidRequestError
from cluster.request import MAX_LOGPROBS, NumChoices
from router.conversation import ChatMessage, template_messages
from router.strict_json import decode, translate
from router.structured import StructureFields, structure_of
from router.tools import ToolChoice, Tools, ToolUse, tool_use_of
from router.unknown_fields import UnknownFields

MAX_INT: Final = 2**31 - 1
MAX_PROMPTS: Final = 128
MAX_ANSWERS: Final = 1024
MAX_STOPS: Final = 64
MAX_STOP_BYTES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIASES: Final = 4096
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_BYTES: Final = 256

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
NaturalInt = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)]
MinP = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
LogitBias = Annotated[
    dict[str, Bias], msgspec.Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}})
]
NumKept = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)]
NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Salt = Annotated[str, msgspec.Meta(max_length=256)]
TokenIds = tuple[int, ...]

_NO: Final[tuple[Any, ...]] = (None, False)
_NOTHING: Final[tuple[Any, ...]] = (None, [], {})
# Options that change the answer and are not offered, with the values that ask for nothing.
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "use_beam_search": _NO,
}
_UNSUPPORTED_COMPLETION: Final[dict[str, tuple[Any, ...]]] = _UNSUPPORTED | {
    "suffix": (None, ""),
}
_UNSUPPORTED_CHAT: Final[dict[str, tuple[Any, ...]]] = _UNSUPPORTED | {
    "add_generation_prompt": (None, True),
    "add_special_tokens": _NO,
    "audio": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": _NOTHING,
    "continue_final_message": _NO,
    "echo": _NO,
    "function_call": (None, "none"),
    "functions": (None,),
    "modalities": (None, ["text"]),
}


class StreamOptions(msgspec.Struct):
    """``stream_options``; ``continuous_usage_stats`` puts the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(StructureFields, kw_only=True):
    """What both endpoints share. Absent and null mean the same everywhere.

    ``spaces_between_special_tokens`` is taken and changes nothing: our decoders never put spaces there.
    """

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    seed: Seed | None = None
    min_tokens: NaturalInt | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: NumKept | None = None
    cache_salt: Salt | None = None

    def num_choices(self) -> int:
        """How many answers to each prompt."""
        return 1 if self.n is None else self.n

    def stops(self) -> tuple[str, ...]:
        """The stop strings; null, "" and empty entries ask for none."""
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return tuple(dict.fromkeys(stop for stop in stops if stop))


class CompletionRequest(RequestFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: NaturalInt | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: PositiveInt | None = None

    def prompts(self) -> list[str | TokenIds]:
        """The prompts, each a text or token ids. Raises :class:`InvalidRequestError` for empty or mixed ones."""
        if isinstance(self.prompt, str):
            found: list[str | TokenIds] = [self.prompt]
        elif all(isinstance(item, int) for item in self.prompt):
            found = [tuple(item for item in self.prompt if isinstance(item, int))]
        elif len({type(item) for item in self.prompt}) == 1 and len(self.prompt) <= MAX_PROMPTS:
            found = [
                tuple(item) if isinstance(item, list) else item for item in self.prompt if not isinstance(item, int)
            ]
        else:
            raise InvalidRequestError(
                f"`prompt` must be a string, a list of token ids, or a list of at most {MAX_PROMPTS} of one of these.",
                param="prompt",
            )
        if not all(found):
            raise InvalidRequestError("`prompt` must not be empty.", param="prompt")
        if len(found) * self.num_choices() > MAX_ANSWERS:
            raise InvalidRequestError(f"`prompt` times `n` must not be over {MAX_ANSWERS} answers.", param="n")
        return found


class ChatRequest(RequestFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(extra_json_schema={"minItems": 1})]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse | None:
        """The tools that may be called, None if there are none. Raises :class:`InvalidRequestError`."""
        return tool_use_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them. Raises :class:`InvalidRequestError`."""
        return template_messages(self.messages)


def decode_completion(body: bytes, unknown: UnknownFields | None = None) -> CompletionRequest:
    """Decode and check a completions body; ``unknown`` hears of its fields. Raises :class:`InvalidRequestError`."""
    names = refuse_unsupported(body, _UNSUPPORTED_COMPLETION)
    request = decode(_completion_decoder, body)
    _check_shared(request)
    if request.best_of not in (None, 1, request.n):
        text = "`best_of` must be 1 or equal to `n`: answers that are not returned are not generated."
        raise InvalidRequestError(text, param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError("`max_tokens` must be at least 1, or 0 with `echo`.", param="max_tokens")
    if unknown is not None:
        unknown.note(names, _KNOWN_COMPLETION)
    return request


def decode_chat(body: bytes, unknown: UnknownFields | None = None) -> ChatRequest:
    """Decode and check a chat body, as :func:`decode_completion` does. Raises :class:`InvalidRequestError`."""
    names = refuse_unsupported(body, _UNSUPPORTED_CHAT)
    request = decode(_chat_decoder, body)
    _check_shared(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
    tools, structure = request.tool_use(), structure_of(request)
    if tools is not None and tools.forced and structure is not None:
        text = f"`{structure.field}` cannot be combined with a `tool_choice` that forces a call."
        raise InvalidRequestError(text, param=structure.field)
    if unknown is not None:
        unknown.note(names, _KNOWN_CHAT)
    return request


def refuse_unsupported(body: bytes, table: dict[str, tuple[Any, ...]]) -> Iterable[str]:
    """The names of the body's fields. Raises :class:`InvalidRequestError` for one of ``table`` with another value than
    those it lists there.
    """
    fields = decode(_fields_decoder, body)
    for field, raw in fields.items():
        neutral = table.get(field)
        if neutral is None:
            continue
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise translate(error) from None
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            raise InvalidRequestError(f"`{field}` is not supported yet.", param=field)
    return fields


def _check_shared(request: RequestFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("`stream_options` needs `stream`: true.", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        text = "`prompt_logprobs` belong to a whole answer: they cannot be had with `stream`: true."
        raise InvalidRequestError(text, param="prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        text = "`truncate_prompt_tokens` must be at least 1, or -1 for as many as fit."
        raise InvalidRequestError(text, param="truncate_prompt_tokens")
    stops = request.stops()
    if len(stops) > MAX_STOPS or any(len(stop.encode()) > MAX_STOP_BYTES for stop in stops):
        text = f"`stop` takes at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes each."
        raise InvalidRequestError(text, param="stop")
    if len(request.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
        text = f"`stop_token_ids` takes at most {MAX_STOP_TOKEN_IDS} ids."
        raise InvalidRequestError(text, param="stop_token_ids")
    if len(request.logit_bias or ()) > MAX_LOGIT_BIASES:
        text = f"`logit_bias` takes at most {MAX_LOGIT_BIASES} tokens."
        raise InvalidRequestError(text, param="logit_bias")
    words = request.bad_words or ()
    if len(words) > MAX_BAD_WORDS or any(not w.strip() or len(w.encode()) > MAX_BAD_WORD_BYTES for w in words):
        text = (
            f"`bad_words` takes at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_BYTES} bytes each, not only blanks."
        )
        raise InvalidRequestError(text, param="bad_words")
    structure_of(request)
    if request.allowed_token_ids == []:
        raise InvalidRequestError("`allowed_token_ids` must not be empty.", param="allowed_token_ids")


_KNOWN_COMPLETION: Final = frozenset((*CompletionRequest.__struct_fields__, *_UNSUPPORTED_COMPLETION))
_KNOWN_CHAT: Final = frozenset((*ChatRequest.__struct_fields__, *_UNSUPPORTED_CHAT))
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
