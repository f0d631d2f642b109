"""The two request bodies, decoded strictly: what a field may hold is written here and nowhere else.

``msgspec`` takes no NaN, no bool for an int, no string for a number and no lone surrogate; fields it does not
know are ignored, except those in the tables of options that would change the answer if they were ignored.
Errors name the field and the type wanted, never what was sent.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec

from cluster.errors import InvalidRequestError
from cluster.request import NumChoices

MAX_INT: Final = 2**31 - 1
MAX_PROMPTS: Final = 128
MAX_ANSWERS: Final = 1024
MAX_STOPS: Final = 64
MAX_STOP_BYTES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Salt = Annotated[str, msgspec.Meta(max_length=256)]
TokenIds = tuple[int, ...]

_NO: Final[tuple[Any, ...]] = (None, False)
_NOTHING: Final[tuple[Any, ...]] = (None, [], {})
# Options that change the answer and are not offered, with the values that ask for nothing.
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": _NOTHING,
    "bad_words": _NOTHING,
    "echo": _NO,
    "frequency_penalty": (None, 0, 0.0),
    "guided_choice": _NOTHING,
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": _NO,
    "logit_bias": _NOTHING,
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0, 0.0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1, 1.0),
    "skip_special_tokens": (None, True),
    "structured_outputs": (None,),
    "top_k": (None, -1, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": _NO,
}
_UNSUPPORTED_COMPLETION: Final[dict[str, tuple[Any, ...]]] = _UNSUPPORTED | {
    "add_special_tokens": (None, True),
    "logprobs": _NO,
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
}
_UNSUPPORTED_CHAT: Final[dict[str, tuple[Any, ...]]] = _UNSUPPORTED | {
    "add_generation_prompt": (None, True),
    "add_special_tokens": _NO,
    "audio": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": _NOTHING,
    "continue_final_message": _NO,
    "function_call": (None, "none"),
    "functions": (None,),
    "logprobs": _NO,
    "modalities": (None, ["text"]),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none"),
    "tools": (None,),
    "top_logprobs": (None, 0),
}
_ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool"))
_PART_TYPES: Final = frozenset(
    ("audio_url", "file", "image", "image_url", "input_audio", "input_image", "refusal", "video_url")
)
_JSON_SCHEMA_FORMATS: Final = ("json_schema", "json_object")


class StreamOptions(msgspec.Struct):
    """``stream_options``; ``continuous_usage_stats`` puts the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestFields(msgspec.Struct, kw_only=True):
    """What both endpoints share. Absent and null mean the same everywhere."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    return_token_ids: bool | None = None
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


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    """The function an earlier answer asked for; ``arguments`` is JSON in a string."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """An earlier answer's tool call, handed to the chat template as history."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def text(self, position: int) -> str:
        """The content as one string, parts joined by newlines. Raises :class:`InvalidRequestError`."""
        param = f"messages[{position}].content"
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role != "assistant":
                raise InvalidRequestError(f"`{param}` must be a string or a list of text parts.", param=param)
            return ""
        for part in self.content:
            if part.type != "text":
                named = f"'{part.type}' parts are" if part.type in _PART_TYPES else "This type of part is"
                raise InvalidRequestError(f"{named} not supported in `{param}`: only 'text' is.", param=param)
            if part.text is None:
                raise InvalidRequestError(f"A text part of `{param}` lacks `text`.", param=param)
        return "\n".join(part.text or "" for part in self.content)


class ChatRequest(RequestFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: PositiveInt | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them. Raises :class:`InvalidRequestError`."""
        if not self.messages:
            raise InvalidRequestError("`messages` must not be empty.", param="messages")
        return [_template_message(message, position) for position, message in enumerate(self.messages)]


def _template_message(message: ChatMessage, position: int) -> dict[str, Any]:
    if message.role not in _ROLES:
        param = f"messages[{position}].role"
        raise InvalidRequestError(f"`{param}` must be one of {', '.join(sorted(_ROLES))}.", param=param)
    # Templates of most models know no developer role; OpenAI defines it as the new name of system.
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": message.text(position)}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    return rendered


def _arguments(call: ToolCall) -> Any:
    """Templates write arguments with ``tojson``: hand them the object, not its text."""
    try:
        return msgspec.json.decode(call.function.arguments)
    except msgspec.DecodeError:
        return call.function.arguments


def decode_completion(body: bytes) -> CompletionRequest:
    """Decode and check a completions body. Raises :class:`InvalidRequestError`."""
    _check_unsupported(body, _UNSUPPORTED_COMPLETION)
    request = _decode(_completion_decoder, body)
    _check_shared(request)
    if request.best_of not in (None, 1, request.n):
        text = "`best_of` must be 1 or equal to `n`: answers that are not returned are not generated."
        raise InvalidRequestError(text, param="best_of")
    return request


def decode_chat(body: bytes) -> ChatRequest:
    """Decode and check a chat body. Raises :class:`InvalidRequestError`."""
    _check_unsupported(body, _UNSUPPORTED_CHAT)
    request = _decode(_chat_decoder, body)
    _check_shared(request)
    return request


def _check_unsupported(body: bytes, table: dict[str, tuple[Any, ...]]) -> None:
    for field, raw in _decode(_fields_decoder, body).items():
        neutral = table.get(field)
        if neutral is None:
            continue
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise _translate(error) from None
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            raise _unsupported(field, value)


def _unsupported(field: str, value: Any) -> InvalidRequestError:
    if field == "response_format" and isinstance(value, dict) and value.get("type") in _JSON_SCHEMA_FORMATS:
        # LangChain looks for this sentence before it falls back to another way of asking.
        kind = next(name for name in _JSON_SCHEMA_FORMATS if name == value["type"])
        text = f"'response_format' of type '{kind}' is not supported with this model"
        return InvalidRequestError(text, param=field)
    return InvalidRequestError(f"`{field}` is not supported yet.", param=field)


def _check_shared(request: RequestFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("`stream_options` needs `stream`: true.", param="stream_options")
    stops = request.stops()
    if len(stops) > MAX_STOPS or any(len(stop.encode()) > MAX_STOP_BYTES for stop in stops):
        text = f"`stop` takes at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes each."
        raise InvalidRequestError(text, param="stop")
    if len(request.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
        text = f"`stop_token_ids` takes at most {MAX_STOP_TOKEN_IDS} ids."
        raise InvalidRequestError(text, param="stop_token_ids")


_Decoded = TypeVar("_Decoded")
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)

_ERROR_PATH: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
# The forms of msgspec's messages that speak only of our schema.
_SAFE_ERROR: Final = re.compile(
    r"Expected `[a-z| ]+`(, got `[a-z]+`| [<>]=? -?[0-9.]+| of length [<>]=? [0-9]+)?"
    r"|Object missing required field `[a-z_]+`|(Integer value|Number) out of range"
)


def _decode(decoder: msgspec.json.Decoder[_Decoded], body: bytes | msgspec.Raw) -> _Decoded:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _translate(error) from None


def _translate(error: Exception) -> InvalidRequestError:
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequestError("The request body is not valid JSON (numbers must be finite, text valid Unicode).")
    found = _ERROR_PATH.match(str(error))
    what, path = ("", None) if found is None else (found["what"], found["path"] or None)
    if not _SAFE_ERROR.fullmatch(what):
        what = "Not an accepted value"
    missing = re.fullmatch("Object missing required field `(.*)`", what)
    if missing is not None:
        path = missing[1] if path is None else f"{path}.{missing[1]}"
        return InvalidRequestError(f"`{path}` is required.", param=path)
    where = "The request body" if path is None else f"`{path}`"
    return InvalidRequestError(f"{where}: {what[0].lower()}{what[1:].replace('`', '')}.", param=path)
