"""Frames: what goes in comes out, and nothing else is ever taken for a message."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from cluster.envelope import MAX_FRAME_BYTES, WIRE_VERSION, Envelope, WireError, decode, encode
from cluster.request import RequestId, RequestKey, SamplingParams, TokenLogprobs
from cluster.wire import (
    Acknowledged,
    Cancel,
    CancelChoice,
    Cancelled,
    Capsule,
    Commit,
    Failed,
    FirstToken,
    Granted,
    Message,
    NodeLoad,
    Party,
    PeerDown,
    PenaltyCounts,
    Ping,
    Pong,
    PromptLogprobs,
    Refused,
    Reserve,
    StartedChoice,
    Submit,
    Ticket,
    Token0,
    TokenItem,
    Tokens,
)

KEY = RequestKey(RequestId("r"), 1)
NAME = b"0123456789abcdef"
DECODE = Party("decode-0", 2**62, "tcp://127.0.0.1:4000")
SAMPLING = SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, seed=2**62, stop_token_ids=(1, 2))
EVERYTHING = SamplingParams(
    max_tokens=8,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    seed=-1,
    choice=3,
    num_choices=128,
    stop_token_ids=(1, 2),
    min_tokens=4,
    repetition_penalty=1.1,
    presence_penalty=-2.0,
    frequency_penalty=0.5,
    logit_bias=((3, -100.0), (4, 2.5)),
    allowed_token_ids=(3, 4, 5),
    banned_token_ids=(6,),
    bad_words=((7, 8), (9, 10, 11)),
    num_logprobs=20,
)
CAPSULE = Capsule(40, (StartedChoice(0, 7),), 1, (5, 6), SAMPLING)
TICKET = Ticket(DECODE, "layout", 16, 16, 3, b"\x00\xff")
MESSAGES: list[Message] = [
    Reserve(KEY, Party("p", 0, "tcp://[::1]:1"), 40, NAME, (NAME, NAME), SAMPLING, 30.0, 2),
    Granted(KEY, TICKET),
    Refused(KEY, "full", 0.25),
    Refused(KEY, "never", None),
    Submit(KEY, (0, 2**32 - 1), (NAME,), SAMPLING, TICKET, 30.0),
    Submit(KEY, (1, 2), (), SAMPLING, TICKET, 30.0, num_prompt_logprobs=20),
    Submit(KEY, (1, 2), (), SamplingParams(max_tokens=0), None, 30.0, num_prompt_logprobs=0),
    PromptLogprobs(KEY, 1, (TokenLogprobs(-0.25, ((7, -0.25),), 1), TokenLogprobs(-9999.0, rank=49152))),
    Token0(KEY, (), 16, 0.1, 0.2),
    Token0(KEY, (FirstToken(0, 7, None),), 16, 0.1, 0.2),
    Token0(
        KEY,
        (
            FirstToken(3, 7, "stop", TokenLogprobs(-0.25, ((7, -0.25), (2**32 - 1, -9999.0)))),
            FirstToken(4, 8, None, TokenLogprobs(-0.5)),
        ),
        16,
        0.1,
        0.2,
    ),
    Commit(KEY, CAPSULE),
    Commit(
        KEY,
        Capsule(
            40,
            (StartedChoice(3, 7), StartedChoice(5, 2**32 - 1)),
            1,
            (5, 6),
            EVERYTHING,
            PenaltyCounts((5, 6), ((7, 1),)),
        ),
    ),
    Acknowledged(KEY),
    Tokens(3, (TokenItem(KEY, 1, (8,), None), TokenItem(KEY, 2, (9, 10), "stop", choice=2))),
    Tokens(3, (TokenItem(KEY, 1, (8, 9), None, (TokenLogprobs(0.0), TokenLogprobs(-1.0, ((8, -0.5),)))),)),
    Cancel(KEY),
    CancelChoice(KEY, 2),
    Cancelled(KEY, 4, 2),
    Failed(KEY, "transfer_failed", "blöcke"),
    PeerDown("decode-0", 5),
    Ping(1),
    Pong(1, NodeLoad(1, 2, 3, 4, 5)),
]
CONTROLLER = Party("router-0", 1, "tcp://127.0.0.1:3999")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


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
    ("field", "value"),
    [
        *((name, value) for name in FLOATS for value in (math.nan, math.inf, -math.inf, 1e300, -1e300)),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-320),
        ("presence_penalty", 2.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("max_tokens", -1),
        ("min_tokens", 2**63),
        ("choice", -1),
        ("num_logprobs", 21),
        ("num_logprobs", -1),
        ("logit_bias", [[1, 100.5]]),
        ("logit_bias", [[1, math.nan]]),
        ("logit_bias", [[-1, 1.0]]),
        ("logit_bias", [[1]]),
        ("allowed_token_ids", [-1]),
        ("banned_token_ids", [2**32]),
        ("num_choices", 0),
        ("num_choices", 129),
        ("num_choices", True),
        ("num_choices", 2.0),
        ("surprise", 1),
    ],
)
def test_options_no_sampler_could_compute_with_are_refused(field: str, value: object) -> None:
    envelope = as_data(Commit(KEY, msgspec.structs.replace(CAPSULE, sampling=EVERYTHING)))
    envelope["body"]["capsule"]["sampling"][field] = value
    with pytest.raises(WireError):
        decode(frame_of(envelope))


def test_options_nobody_asked_for_take_no_bytes() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams(max_tokens=8))) == {"max_tokens": 8}


@pytest.mark.parametrize("count", [0, 129])
def test_no_choices_and_too_many_are_refused(count: int) -> None:
    token0 = as_data(Token0(KEY, (FirstToken(0, 7, None),), 16, 0.1, 0.2))
    token0["body"]["choices"] *= count
    commit = as_data(Commit(KEY, CAPSULE))
    commit["body"]["capsule"]["choices"] *= count
    # No first token is the answer to a request that generates nothing.
    for envelope in (token0, commit) if count else (commit,):
        with pytest.raises(WireError):
            decode(frame_of(envelope))


def test_each_choice_is_asked_for_as_if_alone() -> None:
    alone = msgspec.structs.replace(EVERYTHING, num_choices=1)
    assert alone.choices() == (alone,)
    three = msgspec.structs.replace(EVERYTHING, num_choices=3)
    assert three.choices() == tuple(msgspec.structs.replace(alone, choice=choice) for choice in (3, 4, 5))


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, -10_000.0, 0.1])
def test_logprobs_clients_cannot_read_are_refused(logprob: float) -> None:
    envelope = as_data(Token0(KEY, (FirstToken(0, 7, None, TokenLogprobs(-1.0)),), 16, 0.1, 0.2))
    envelope["body"]["choices"][0][3][0] = logprob
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
