"""Text to token ids and back, with the model's own ``tokenizer.json``: the one home of ``tokenizers``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
import tokenizers.decoders

from cluster.errors import ContextLengthError, InvalidRequestError
from router.chat_template import ChatTemplate
from router.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from router.tool_formats import ParserName, ToolFormat, format_of

_INLINE_CHARS: Final = 8 << 10
_INLINE_TOKENS: Final = 4 << 10
_CONTEXT_TOKENS: Final = 6
_CHARS_A_TOKEN: Final = 64
# What a template writes around a message, and then some.
_CHARS_A_MESSAGE: Final = 64
# Vocabularies of sentencepiece: a byte that no token covers, and U+2581 for a space.
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class _Table(dict[int, bytes]):
    """Bytes by token id, each computed when it is first asked for."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._compute(token_id)
        return found


class Tokenizer:
    """A model's vocabulary; shared by all requests, changed by none."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """``vocab_size`` is the model's, which may be larger than the tokenizer's own."""
        # A file may ask for cutting or filling to some length; a server does neither behind the client's back.
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._backend = backend
        self._chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._token_bytes = _Table(self._compute_bytes)
        self._shown_bytes = _Table(
            lambda token_id: b"" if token_id in self._special_ids else self.token_bytes(token_id)
        )
        # Of a byte-level vocabulary a token stands for as many bytes as it has characters. A normalizer may
        # shorten text, so that no size is certainly too large.
        longest = [*map(len, backend.get_vocab()), *(len(token.content.encode()) for token in added.values())]
        bounded = self._is_byte_level and backend.normalizer is None
        self._max_token_bytes = max(longest, default=1) if bounded else None

    @classmethod
    def from_directory(cls, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> Tokenizer:
        """Load ``tokenizer.json`` and, where there is one, the chat template."""
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        template = ChatTemplate.from_directory(directory)
        return cls(backend, vocab_size=vocab_size, eos_token_ids=eos_token_ids, chat_template=template)

    async def encode_prompt(
        self, text: str, *, max_tokens: int, add_special_tokens: bool = True, keep: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of a completion prompt, with the special tokens the model's own post-processor adds.

        With ``keep`` only the last so many, among them those special tokens. Otherwise raises
        :class:`ContextLengthError` for text that cannot fit ``max_tokens``, before any work is spent on it.
        """
        text = self._bounded(text, max_tokens, "prompt", cut=keep is not None)
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens, keep)
        return await asyncio.to_thread(self._encode, text, add_special_tokens, keep)

    def encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token sequences that write short words, at the beginning of a text and after a space; each once."""
        stripped = (word.lstrip() for word in words)
        texts = [text for word in stripped for text in (word, f" {word}")]
        found = (self._encode(text, False, None) for text in texts)
        return [token_ids for token_ids in dict.fromkeys(found) if token_ids]

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        max_tokens: int,
        tools: Sequence[dict[str, Any]] | None = None,
        keep: int | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat format; the template writes all special tokens.

        Raises :class:`InvalidRequestError` if the model has no chat template or it refuses the messages. ``keep`` and
        :class:`ContextLengthError` as in :meth:`encode_prompt`.
        """
        if not tools and _is_short(messages):
            return self._encode_chat(messages, max_tokens, tools, keep)
        return await asyncio.to_thread(self._encode_chat, messages, max_tokens, tools, keep)

    def decode(self, token_ids: Sequence[int], *, show_special: bool = False) -> str:
        """The text of a whole sequence; special tokens are left out unless they are to be shown."""
        return self._backend.decode(list(token_ids), skip_special_tokens=not show_special)

    async def decode_prompt(self, token_ids: Sequence[int], *, show_special: bool = False) -> str:
        """As :meth:`decode`, for sequences of any length: long ones are decoded off the event loop."""
        if len(token_ids) <= _INLINE_TOKENS:
            return self.decode(token_ids, show_special=show_special)
        return await asyncio.to_thread(self.decode, token_ids, show_special=show_special)

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, show_special: bool = False, markers: Sequence[str] = ()
    ) -> Detokenizer:
        """A decoder for the tokens that follow ``prompt_token_ids``. ``markers`` are shown, be they special or not."""
        kept = self._special_ids & {self._backend.token_to_id(marker) for marker in markers}
        if self._is_byte_level:
            if show_special or not kept:
                return ByteDetokenizer((self._token_bytes if show_special else self._shown_bytes).__getitem__)
            return ByteDetokenizer(
                lambda token_id: (self._token_bytes if token_id in kept else self._shown_bytes)[token_id]
            )
        decode, hidden = (
            (self._decode_all, frozenset[int]()) if show_special else (self.decode, self._special_ids - kept)
        )
        return WindowDetokenizer(self._decode_all if kept else decode, hidden, prompt_token_ids[-_CONTEXT_TOKENS:])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; those of its text for a special one, none for an unknown id."""
        return self._token_bytes[token_id]

    def special_tokens(self) -> dict[str, str]:
        """The texts of ``bos_token``, ``eos_token`` and so on that the model's configuration names."""
        return {} if self._chat_template is None else dict(self._chat_template.special_tokens)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return None if self._chat_template is None else self._chat_template.source

    def tool_format(self, wanted: ParserName = "auto") -> ToolFormat:
        """How the model writes calls of tools. Raises :class:`ValueError` where its chat template contradicts."""
        template = self._chat_template
        if template is None:
            return format_of(wanted, "", knows_tools=False)
        return format_of(wanted, template.tool_source, knows_tools=template.knows_tools)

    def _encode(self, text: str, add_special_tokens: bool, keep: int | None) -> tuple[int, ...]:
        if keep is None:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # As transformers truncates on the left: the special tokens stay.
        found = self._backend.encode(text, add_special_tokens=False)
        num_special = self._backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        found.truncate(max(0, keep - num_special), direction="left")
        return tuple(self._backend.post_process(found, add_special_tokens=add_special_tokens).ids[-keep:])

    def _encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        max_tokens: int,
        tools: Sequence[dict[str, Any]] | None,
        keep: int | None,
    ) -> tuple[int, ...]:
        if self._chat_template is None:
            raise InvalidRequestError("This model has no chat template: use /v1/completions.", param="messages")
        text = self._chat_template.render(messages, tools)
        return self._encode(self._bounded(text, max_tokens, "messages", cut=keep is not None), False, keep)

    def _bounded(self, text: str, max_tokens: int, param: str, *, cut: bool) -> str:
        """The text, or its end, if it can fit ``max_tokens``: a megabyte costs seconds to tokenise."""
        if cut:
            # Far more than the tokens to keep: where this end begins decides about the first of its tokens only.
            return text[-max_tokens * (self._max_token_bytes or _CHARS_A_TOKEN) :]
        if self._max_token_bytes is None:
            return text
        size = len(text.encode())
        if size > max_tokens * self._max_token_bytes:
            raise ContextLengthError(
                f"This model's maximum context length is {max_tokens} tokens. However, your {param} of {size} "
                "bytes cannot fit into it. Please reduce its length. (context_length_exceeded)",
                param=param,
            )
        return text

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids, show_special=True)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._is_byte_level:
            fallback = _BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(fallback[1]) if fallback else token.replace("\u2581", " ").encode("utf-8")
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token is stored as plain text
            return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: Latin-1's printable characters stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF_CHAR: Final = _byte_alphabet()


def _is_short(messages: Sequence[dict[str, Any]]) -> bool:
    """True if the way to a thread and back would take longer than to write and encode this conversation."""
    size = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) or not message.keys() <= {"role", "content"}:
            return False
        size += len(content) + _CHARS_A_MESSAGE
    return size <= _INLINE_CHARS
