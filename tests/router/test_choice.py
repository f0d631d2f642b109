from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.choice import Choice
from router.completion import Piece
from router.generation import TokenDelta

WORDS = {1: "one", 2: " two", 3: " three", 4: "<half"}
EOS = 9


class Words:
    """Each id is a word, except that the text of id 4 stays open until the next one or the end."""

    def __init__(self) -> None:
        self._open = ""

    def feed(self, token_id: int) -> str:
        text, self._open = self._open + WORDS.get(token_id, ""), ""
        if token_id == 4:
            text, self._open = "", text
        return text

    def flush(self) -> str:
        return self._open


def choice(*stops: str) -> Choice:
    return Choice(Words(), stops, (EOS,))


def test_a_stop_token_counts_and_is_not_shown() -> None:
    follower = choice()
    assert follower.feed(TokenDelta((1, 2), "stop", 5)) == Piece("one", (1, 2), "stop", 2)
    assert (follower.num_tokens, follower.cached_tokens, follower.finish_reason) == (2, 5, "stop")


def test_eos_gives_no_stop_reason() -> None:
    assert choice().feed(TokenDelta((1, EOS), "stop")) == Piece("one", (1, EOS), "stop", None)


def test_a_length_stop_shows_its_last_token() -> None:
    assert choice().feed(TokenDelta((1, 2), "length")) == Piece("one two", (1, 2), "length", None)


def test_tokens_after_a_stop_string_are_not_the_answers() -> None:
    follower = choice(" tw")
    assert follower.feed(TokenDelta((1, 2, 3), "length")) == Piece("one", (1, 2), "stop", " tw")
    assert follower.num_tokens == 2


def test_a_stop_string_across_deltas() -> None:
    follower = choice("e two t")
    assert follower.feed(TokenDelta((1,), None)) == Piece("on", (1,))
    assert follower.feed(TokenDelta((2,), None)) == Piece("", (2,))
    assert follower.feed(TokenDelta((3,), None)) == Piece("", (3,), "stop", "e two t")


@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize(("stops", "shown"), [((), "one<half"), (("<half of it",), "one<half"), (("x", "<h"), "one")])
def test_what_was_held_back_is_shown_at_the_end(stops: Sequence[str], shown: str, finish: str) -> None:
    follower = choice(*stops)
    ids = (1, 4) if finish == "length" else (1, 4, EOS)
    piece = follower.feed(TokenDelta(ids, finish))  # type: ignore[arg-type]
    assert piece.text == shown
    assert (piece.finish_reason, piece.stop_reason) == (("stop", "<h") if shown == "one" else (finish, None))
