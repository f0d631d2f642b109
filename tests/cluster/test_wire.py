"""Frames: what goes in comes out, and nothing else is ever taken for a message."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import (
    MAX_FRAME_BYTES,
    WIRE_VERSION,
    Acknowledged,
    Cancel,
    Cancelled,
    Capsule,
    Commit,
    Envelope,
    Failed,
    Granted,
    Message,
    NodeLoad,
    Party,
    PeerDown,
    Ping,
    Pong,
    Refused,
    Reserve,
    Submit,
    Ticket,
    Token0,
    TokenItem,
    Tokens,
    WireError,
    decode,
    encode,
)

KEY = RequestKey(RequestId("r"), 1)
NAME = b"0123456789abcdef"
DECODE = Party("decode-0", 2**62, "tcp://127.0.0.1:4000")
SAMPLING = SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, seed=2**62, stop_token_ids=(1, 2))
TICKET = Ticket(DECODE, "layout", 16, 3, b"\x00\xff")
MESSAGES: list[Message] = [
    Reserve(KEY, Party("p", 0, "tcp://[::1]:1"), 40, NAME, (NAME, NAME), SAMPLING, 30.0, 2),
    Granted(KEY, TICKET),
    Refused(KEY, "full", 0.25),
    Refused(KEY, "never", None),
    Submit(KEY, (0, 2**32 - 1), (NAME,), SAMPLING, TICKET, 30.0),
    Token0(KEY, 7, None, 16, 0.1, 0.2),
    Commit(KEY, Capsule(40, 7, 1, (5, 6), SAMPLING)),
    Acknowledged(KEY),
    Tokens(3, (TokenItem(KEY, 1, (8,), None), TokenItem(KEY, 2, (9, 10), "stop"))),
    Cancel(KEY),
    Cancelled(KEY, 4, 2),
    Failed(KEY, "transfer_failed", "blöcke"),
    PeerDown("decode-0", 5),
    Ping(1),
    Pong(1, NodeLoad(1, 2, 3, 4, 5)),
]
CONTROLLER = Party("router-0", 1, "tcp://127.0.0.1:3999")


def frame_of(envelope: object) -> bytes:
    """A frame of our version around anything, as a peer with another program might send it."""
    return bytes([WIRE_VERSION]) + msgspec.msgpack.encode(envelope)


def as_data(message: Message) -> dict[str, Any]:
    """The envelope of ``message`` as plain dicts and lists, to be damaged."""
    data: dict[str, Any] = msgspec.msgpack.decode(encode(Envelope(CONTROLLER, 9, message))[1:])
    return data


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Message) -> None:
    envelope = Envelope(CONTROLLER, 2**63 - 1, message)
    assert decode(encode(envelope)) == envelope


def test_every_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(Message.__args__)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_give_a_wire_error(data: bytes) -> None:
    for frame in (data, bytes([WIRE_VERSION]) + data):
        with pytest.raises(WireError):
            decode(frame)


@given(st.sampled_from(MESSAGES), st.data())
@settings(deadline=None, max_examples=300)
def test_damaged_frames_are_messages_or_wire_errors(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(Envelope(CONTROLLER, 9, message)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        with contextlib.suppress(WireError):
            assert isinstance(decode(damaged), Envelope)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(MESSAGES), json_like, st.data())
@settings(deadline=None, max_examples=300)
def test_fields_of_another_kind_are_messages_or_wire_errors(
    message: Message, value: object, data: st.DataObject
) -> None:
    envelope = as_data(message)
    inside = data.draw(st.sampled_from([envelope, envelope["body"]]))
    inside[data.draw(st.sampled_from(sorted(inside)))] = value
    with contextlib.suppress(WireError):
        assert isinstance(decode(frame_of(envelope)), Envelope)


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Refused(KEY, "full", 0.25), "retry_after_s", math.nan),
        (Refused(KEY, "full", 0.25), "retry_after_s", math.inf),
        (Refused(KEY, "full", 0.25), "retry_after_s", -1.0),
        (Submit(KEY, (1,), (NAME,), SAMPLING, TICKET, 30.0), "prompt_token_ids", [-1]),
        (Submit(KEY, (1,), (NAME,), SAMPLING, TICKET, 30.0), "prompt_token_ids", [2**32]),
        (Submit(KEY, (1,), (NAME,), SAMPLING, TICKET, 30.0), "block_hashes", [b"short"]),
        (Submit(KEY, (1,), (NAME,), SAMPLING, TICKET, 30.0), "deadline_s", math.nan),
        (Cancelled(KEY, 1, 1), "blocks_freed", -1),
        (PeerDown("n", 1), "node_id", "a\nb"),
        (PeerDown("n", 1), "node_id", "a\n"),
        (Ping(1), "surprise", 1),
    ],
)
def test_values_no_node_could_compute_with_are_refused(message: Message, field: str, value: object) -> None:
    envelope = as_data(message)
    envelope["body"][field] = value
    with pytest.raises(WireError):
        decode(frame_of(envelope))


@pytest.mark.parametrize(
    "address",
    [
        "http://169.254.169.254/",
        "tcp://host",
        "tcp://host:99999999",
        "tcp://a b:1",
        "inproc://x",
        "ipc:///tmp/x",
        "tcp://127.0.0.1:1\n",
        "tcp://127.0.0.1:1;tcp://10.0.0.1:1",
        "",
    ],
)
def test_a_sender_must_have_a_plain_address(address: str) -> None:
    envelope = as_data(Ping(1))
    envelope["sender"][2] = address
    with pytest.raises(WireError):
        decode(frame_of(envelope))


def test_deep_nesting_is_a_wire_error() -> None:
    deep = b"\x91" * 100_000
    with pytest.raises(WireError):
        decode(bytes([WIRE_VERSION]) + b"\x81\xa1x" + deep)


def test_other_versions_and_sizes_are_refused() -> None:
    frame = encode(Envelope(CONTROLLER, 9, Ping(1)))
    with pytest.raises(WireError, match="version"):
        decode(bytes([WIRE_VERSION + 1]) + frame[1:])
    with pytest.raises(WireError):
        decode(frame + b"\x00")
    with pytest.raises(WireError):
        decode(b"\x01" * (MAX_FRAME_BYTES + 1))
    with pytest.raises(WireError):
        encode(Envelope(CONTROLLER, 9, Failed(KEY, "x", "y" * MAX_FRAME_BYTES)))
