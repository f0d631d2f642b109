from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.request import TokenLogprobs
from router.choice import Choice, TextRules
from router.completion import Piece, joined
from router.generation import TokenDelta
from router.logprobs import TokenEntry

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
    return Choice(Words(), TextRules(stops), (EOS,))


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


def follow(rules: TextRules, *deltas: TokenDelta) -> Piece:
    """The whole answer, and that nothing is asked after its end."""
    follower = Choice(Words(), rules, (EOS,))
    pieces: list[Piece] = []
    for delta in deltas:
        assert not pieces or pieces[-1].finish_reason is None
        pieces.append(follower.feed(delta))
    return joined(pieces)


@pytest.mark.parametrize("stop", [" two", "e tw", "one two"])
def test_e8_a_stop_string_may_belong_to_the_text(stop: str) -> None:
    whole = "one two three"
    shown = whole[: whole.index(stop) + len(stop)]
    ends = follow(TextRules((stop,), show_stop=True), TokenDelta((1,), None), TokenDelta((2,), None))
    assert (ends.text, ends.finish_reason, ends.stop_reason) == (shown, "stop", stop)
    hidden = follow(TextRules((stop,)), TokenDelta((1, 2, 3), "length"))
    assert (hidden.text, hidden.stop_reason) == (whole[: whole.index(stop)], stop)


def test_a_stop_token_may_belong_to_the_text() -> None:
    assert follow(TextRules(show_stop=True), TokenDelta((1, 2), "stop")).text == "one two"
    assert follow(TextRules(show_stop=True), TokenDelta((1, EOS), "stop")).text == "one"


@pytest.mark.parametrize(
    ("min_tokens", "shown"),
    [(0, "one"), (1, "one"), (2, "one two three"), (3, "one two three"), (4, "one two three two")],
)
def test_stop_strings_wait_for_min_tokens(min_tokens: int, shown: str) -> None:
    deltas = [TokenDelta((token_id,), None) for token_id in (1, 2, 3)]
    last = TokenDelta((2,), "length")
    follower = Choice(Words(), TextRules((" two",), min_tokens), (EOS,))
    text = ""
    for delta in (*deltas, last):
        piece = follower.feed(delta)
        text += piece.text
        if piece.finish_reason is not None:
            break
    assert (text, piece.finish_reason) == (shown, "length" if min_tokens == 4 else "stop")


def test_entries_say_where_each_token_begins() -> None:
    """Also those that show nothing, and no more of them than tokens that count."""
    scores = tuple(TokenLogprobs(-float(number)) for number in range(4))
    ends = follow(
        TextRules((" th",)), TokenDelta((1, 4), None, 0, scores[:2]), TokenDelta((2, 3), None, None, scores[2:])
    )
    assert ends.text == "one<half two"
    assert ends.entries == tuple(
        TokenEntry(token_id, offset, score)
        for token_id, offset, score in zip((1, 4, 2, 3), (0, 3, 3, 12), scores, strict=True)
    )
    cut = follow(TextRules(("on",)), TokenDelta((1, 2, 3), "length", 0, scores[:3]))
    assert (cut.text, cut.entries) == ("", (TokenEntry(1, 0, scores[0]),))
