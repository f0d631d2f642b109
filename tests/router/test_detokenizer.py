"""Pieces against the whole: text shown token by token is the text of all tokens, and never half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from router.detokenizer import Detokenizer, WindowDetokenizer
from router.tokenizer import Tokenizer

TEXTS = [
    "plain words, and more.",
    "  leading and trailing  ",
    "東京は日本の首都です。北京是中国的首都。서울",
    "family 👨‍👩‍👧‍👦, flag 🏳️‍🌈, skin 👍🏽, keycap 1️⃣",
    "e\u0301 a\u0308 \u0915\u094d\u0937 \u0e01\u0e33",
    "مرحبا بالعالم — שלום",
    "tabs\tand\r\nlines\n\n\n  code():\n    pass",
    "\ufffd literal replacement \ufffd\ufffd",
    "\x00\x01\x7f\x80\u00ad\u200b\u2028",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


def pieces(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """A vocabulary in the manner of Llama 2: words with ▁, single bytes for the rest, a stripped first space."""
    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁He", "llo", "▁world", "a", "b", "é", "東", "!"]
    backend = tokenizers.Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, vocab_size=len(words), eos_token_ids=(1,))


@pytest.mark.parametrize("text", TEXTS)
def test_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
    shown = pieces(tokenizer.detokenizer(), ids)
    assert "".join(shown) == tokenizer.decode(ids)
    if "<|im" not in text:
        assert "".join(shown) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in shown)


@given(st.lists(st.integers(0, 49151), max_size=40))
def test_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    shown = pieces(tokenizer.detokenizer(), ids)
    assert "".join(shown) == tokenizer.decode(ids)


@given(st.text(max_size=40), st.data())
def test_a_text_cut_anywhere(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    *streamed, end = pieces(tokenizer.detokenizer(), ids)
    assert "".join(streamed) + end == tokenizer.decode(ids)
    assert end in ("", "\ufffd")


def test_special_ids_and_ids_beyond_the_vocabulary_show_nothing(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer.detokenizer(), [0, 1, 2, 49152, 10**6]) == [""] * 6


def test_half_a_character_is_flushed_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer._backend.encode("🦜", add_special_tokens=False).ids
    assert pieces(tokenizer.detokenizer(), ids[:-1]) == [""] * (len(ids) - 1) + ["\ufffd"]


@given(st.lists(st.integers(0, 267), max_size=30))
def test_any_ids_of_another_kind_never_lose_text(byte_fallback: Tokenizer, ids: list[int]) -> None:
    shown = "".join(pieces(byte_fallback.detokenizer(), ids))
    whole = byte_fallback.decode(ids)
    if "\ufffd" not in whole:
        assert shown == whole


@given(st.text(alphabet="He lloworldabé東🦜!", max_size=30))
def test_texts_of_another_kind(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback._backend.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(byte_fallback.detokenizer(), ids)) == byte_fallback.decode(ids)


def test_a_space_after_the_prompt_is_kept(byte_fallback: Tokenizer) -> None:
    prompt = byte_fallback._backend.encode("Hello", add_special_tokens=False).ids
    answer = byte_fallback._backend.token_to_id("▁world")
    assert pieces(byte_fallback.detokenizer(prompt), [answer]) == [" world", ""]
    assert pieces(byte_fallback.detokenizer(), [answer]) == ["world", ""]


def test_the_window_stays_small() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "".join("\ufffd" if token_id else "x" for token_id in ids)

    detokenizer = WindowDetokenizer(decode, skipped={7})
    ids = [0, 1] * 50 + [1] * 200 + [7] * 200 + [0]
    shown = "".join(pieces(detokenizer, ids))
    assert shown == decode([token_id for token_id in ids if token_id != 7])
    assert max(lengths[:-1]) <= 2 * WindowDetokenizer.MAX_PENDING


@pytest.mark.parametrize("text", TEXTS)
def test_f4_f5_the_tokens_bytes_are_the_texts(tokenizer: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    """No stand-ins for bytes and spaces in a token's name; half characters join to whole ones."""
    ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    ids = byte_fallback._backend.encode(text, add_special_tokens=False).ids
    assert b"".join(map(byte_fallback.token_bytes, ids)).decode() == byte_fallback._backend.normalizer.normalize_str(
        text
    ).replace("▁", " ")


def test_special_tokens_have_names_and_show_on_request(tokenizer: Tokenizer, byte_fallback: Tokenizer) -> None:
    for one, ids, shown in (
        (tokenizer, [1, 8305, 2], "<|im_start|>{}<|im_end|>"),
        (byte_fallback, [0, 260, 261, 1], "<s>{}</s>"),
    ):
        plain = one.decode(ids)
        assert "<" not in plain
        whole = "".join(pieces(one.detokenizer(show_special=True), ids))
        assert whole == one.decode(ids, show_special=True)
        assert whole.replace(" ", "") == shown.format(plain).replace(" ", "")
        assert "".join(pieces(one.detokenizer(), ids)) == plain
        assert one.token_bytes(ids[0]).decode() == shown.partition("{}")[0]
