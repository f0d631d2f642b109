"""Turning token ids into text one token at a time, never showing half a character.

Two decoders with one contract: the pieces of ``feed`` and the final ``flush`` concatenate to exactly what
decoding all ids at once gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"


class Detokenizer(Protocol):
    """Text of one growing token sequence."""

    def feed(self, token_id: int) -> str:
        """Text that is complete with this token; empty for special tokens and for part of a character."""
        ...

    def flush(self) -> str:
        """The sequence is over: U+FFFD for a character that never became whole, else empty."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM), where each token is a string of bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """``token_bytes`` gives a token's own."""
        self._token_bytes = token_bytes
        self._open = b""  # of a character that is not whole yet

    def feed(self, token_id: int) -> str:
        data = self._token_bytes(token_id)
        if self._open:
            data = self._open + data
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._open = data[num_read:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._open, "replace", True)
        self._open = b""
        return text


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window twice and shows the difference.

    The window starts one shown piece before the unshown tokens, because a decoder may treat its first token
    differently (a leading space). ``context`` holds the last prompt tokens for the same reason. A window that
    ends in U+FFFD waits for more tokens, up to :attr:`MAX_PENDING`: an unfinished character has at most three
    byte tokens, so a longer run is text that will stay broken, and waiting on would make it quadratic.
    Runs of *invalid* byte tokens longer than that are the one case where the pieces may differ from the whole.
    """

    MAX_PENDING: Final = 8

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped: Container[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        """``decode`` turns ids into text without special tokens; ``skipped`` holds the ids it leaves out."""
        self._decode = decode
        self._skipped = skipped
        self._window = [token_id for token_id in context if token_id not in skipped]
        self._num_shown = len(self._window)
        self._shown = decode(self._window) if self._window else ""

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = text.endswith(_REPLACEMENT) and len(self._window) - self._num_shown < self.MAX_PENDING
        if waiting or len(text) <= len(self._shown):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        text = self._decode(self._window)
        return self._advance(text) if len(text) > len(self._shown) else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._shown) :]
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return piece
