"""The messages of a conversation: as clients send them, and as chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from cluster.errors import InvalidRequestError

_ROLES: Final = ("assistant", "developer", "system", "tool", "user")
# Said in the schema; checked below, where the refusal can say what would be right.
_Role = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(_ROLES)})]
_PartType = Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["text"]})]
_PART_TYPES: Final = frozenset(
    ("audio_url", "file", "image", "image_url", "input_audio", "input_image", "refusal", "video_url")
)


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text is understood."""

    type: _PartType
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

    role: _Role
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


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a chat template reads them. Raises :class:`InvalidRequestError`."""
    if not messages:
        raise InvalidRequestError("`messages` must not be empty.", param="messages")
    return [_template_message(message, position) for position, message in enumerate(messages)]


def _template_message(message: ChatMessage, position: int) -> dict[str, Any]:
    if message.role not in _ROLES:
        param = f"messages[{position}].role"
        raise InvalidRequestError(f"`{param}` must be one of {', '.join(_ROLES)}.", param=param)
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
    """Templates write arguments with ``tojson``: hand them the object, not its text. No text is no arguments."""
    text = call.function.arguments
    try:
        return msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text
