"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: the model's tokenizer for clients that count tokens."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cluster.errors import ContextLengthError, InvalidRequestError
from router.conversation import ChatMessage, template_messages
from router.replies import DetokenizeReply, TokenizeReply, TokenizerInfo
from router.sampling import in_vocabulary
from router.schemas import TokenId, refuse_unsupported
from router.strict_json import decode
from router.tokenizer import Tokenizer
from router.tools import Tools, check_tools, shown
from router.unknown_fields import UnknownFields

# Options that change the tokens and are not offered, with the values that ask for nothing.
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (None, True),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a ``prompt``, or ``messages`` (and ``tools``) as a chat would see them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(request: TokenizeRequest, tokenizer: Tokenizer, max_model_len: int) -> TokenizeReply:
    """The token ids that a completion or a chat with this input would have as its prompt.

    Raises :class:`InvalidRequestError` and, for text that cannot fit the model, ``ContextLengthError``.
    """
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Send either `prompt` or `messages`.", param="prompt")
    tools = None if request.tools is None else [tool.function for tool in request.tools]
    if tools is not None:
        check_tools(tools)
        if request.messages is None:
            raise InvalidRequestError("`tools` are for `messages`.", param="tools")
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        token_ids = await tokenizer.encode_prompt(request.prompt, max_tokens=max_model_len, add_special_tokens=special)
    else:
        if request.add_special_tokens:
            text = "The chat template writes all special tokens: `add_special_tokens` is for a `prompt`."
            raise InvalidRequestError(text, param="add_special_tokens")
        messages = template_messages(request.messages or ())
        token_ids = await tokenizer.encode_chat(
            messages, max_tokens=max_model_len, tools=None if tools is None else [shown(tool) for tool in tools]
        )
    names = None
    if request.return_token_strs:
        names = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
    return TokenizeReply(token_ids, len(token_ids), max_model_len, names)


async def detokenize(request: DetokenizeRequest, tokenizer: Tokenizer, max_model_len: int) -> DetokenizeReply:
    """The text of token ids, special tokens included.

    Raises :class:`InvalidRequestError` for an unknown id, :class:`ContextLengthError` for more than fit the model.
    """
    if len(request.tokens) > max_model_len:
        raise ContextLengthError(f"`tokens` takes at most {max_model_len} ids.", param="tokens")
    in_vocabulary(request.tokens, tokenizer.vocab_size, "tokens")
    return DetokenizeReply(await tokenizer.decode_prompt(request.tokens, show_special=True))


def tokenizer_info(tokenizer: Tokenizer, max_model_len: int) -> TokenizerInfo:
    """What lm-eval reads before it trusts ``/tokenize``."""
    special = tokenizer.special_tokens()
    return TokenizerInfo(
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        unk_token=special.get("unk_token"),
        pad_token=special.get("pad_token"),
        chat_template=tokenizer.chat_template,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
    )


def decode_tokenize(body: bytes, unknown: UnknownFields) -> TokenizeRequest:
    """Decode the body of ``/tokenize``; ``unknown`` hears of its fields. Raises :class:`InvalidRequestError`."""
    names = refuse_unsupported(body, _UNSUPPORTED)
    request = decode(_tokenize_decoder, body)
    unknown.note(names, (*TokenizeRequest.__struct_fields__, *_UNSUPPORTED))
    return request


def decode_detokenize(body: bytes, unknown: UnknownFields) -> DetokenizeRequest:
    """Decode the body of ``/detokenize``; ``unknown`` hears of its fields. Raises :class:`InvalidRequestError`."""
    names = refuse_unsupported(body, {})
    request = decode(_detokenize_decoder, body)
    unknown.note(names, DetokenizeRequest.__struct_fields__)
    return request


_tokenize_decoder: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder: Final = msgspec.json.Decoder(DetokenizeRequest)
