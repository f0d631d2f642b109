from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop import StopMatcher

TEXTS = st.text(alphabet="ab🦜", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🦜", min_size=1, max_size=6), max_size=5)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What the matcher's docstring promises, computed the slow way: grow the text until a stop string ends it."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, bool]:
    shown = ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def split(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_any_split_gives_the_same_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, matched = cut(text, stops)
    matcher = StopMatcher(stops)
    assert run(matcher, split(text, cuts)) == (expected, matched is not None)
    assert matcher.matched == matched


@given(TEXTS, STOPS)
def test_only_what_may_begin_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for position, character in enumerate(text, start=1):
        piece, stopped = matcher.feed(character)
        shown += piece
        if stopped:
            return
        held = text[len(shown) : position]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["END"], "xENENDy", "xEN"),
        (["ab", "abc"], "xabc", "x"),
        (["bc", "abcd"], "abcd", "a"),
        (["xbc", "bc"], "axbc", "a"),
        (["aaa"], "aaaa", ""),
        (["👧"], "👩‍👩‍👧", "👩‍👩‍"),
        ([], "text", "text"),
    ],
)
def test_which_match_wins(stops: list[str], text: str, shown: str) -> None:
    assert run(StopMatcher(stops), [text])[0] == shown
    assert run(StopMatcher(stops), list(text))[0] == shown


def test_flush_gives_back_an_unfinished_match_once() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("a sto") == ("a ", False)
    assert matcher.flush() == "sto"
    assert matcher.flush() == ""
