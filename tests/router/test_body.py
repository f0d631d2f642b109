from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from router.body import MAX_JSON_DEPTH, is_bounded

JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='[]{}"\\a', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=4)
    ),
)


def nested(depth: int, width: int = 1) -> bytes:
    """Arrays ``depth`` deep with ``width`` more next to the innermost, beside brackets that only stand in strings."""
    return b'["' + b"[" * 100 + b'\\"", ' + b"[" * (depth - 1) + b"[]," * width + b"1" + b"]" * (depth - 1) + b"]"


@given(JSON)
def test_ordinary_json_is_bounded(value: object) -> None:
    assert is_bounded(json.dumps([value] * 70).encode())


def test_the_limit() -> None:
    assert is_bounded(nested(MAX_JSON_DEPTH - 1))
    assert is_bounded(nested(MAX_JSON_DEPTH - 1, width=5))
    assert not is_bounded(nested(MAX_JSON_DEPTH))
    assert not is_bounded(nested(10_000))


def test_what_is_not_json_at_all() -> None:
    assert not is_bounded(b"[" * 100_000)
    assert is_bounded(b"]" * 10 + b"[" * 70)  # the decoder's business
    assert is_bounded(b'"' + b"[" * 100)  # an unterminated string holds no brackets; the decoder refuses it
    assert is_bounded(b'"\\"' * 1_000_000)


def test_many_small_parts() -> None:
    assert is_bounded(b"[" + b"[]," * 100_000 + b"1]")
    assert not is_bounded(b"[" + b"[]," * 2_000_000 + b"1]")
