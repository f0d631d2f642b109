from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import HelloError, TicketError
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.ticket import (
    TICKET_ID_BITS,
    BlockHandle,
    Hello,
    TransferTicket,
    decode_hello,
    decode_ticket,
    encode_hello,
    encode_ticket,
    new_ticket_id,
)

ADDRESSES = {"tcp": b"127.0.0.1:1", "ucx": b"\0" * 200}
HELLO = Hello(WIRE_VERSION, "D", (1 << 64) - 1, "f" * 32, 737280, 100, ADDRESSES, "sampled")
V = bytes([WIRE_VERSION])
TICKET = TransferTicket(new_ticket_id(), HELLO, tuple(BlockHandle(block, 1 << 40) for block in range(50)))


def changed(**fields) -> bytes:
    return encode_ticket(msgspec.structs.replace(TICKET, **fields))


def hello_with(**fields) -> Hello:
    return msgspec.structs.replace(HELLO, **fields)


def test_round_trip():
    assert decode_hello(encode_hello(HELLO)) == HELLO
    assert decode_ticket(encode_ticket(TICKET)) == TICKET


def test_ticket_ids_are_random_and_fit_the_tag():
    ids = {new_ticket_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(0 < number < 1 << TICKET_ID_BITS for number in ids)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        V,
        bytes([WIRE_VERSION + 1]) + encode_ticket(TICKET)[1:],
        encode_ticket(TICKET)[:-1],
        encode_ticket(TICKET) + b"\0",
        V + b"\x91" * 100_000,
        V + b"\xdd\xff\xff\xff\xff",
        changed(ticket_id=0),
        changed(ticket_id=1 << TICKET_ID_BITS),
        changed(handles=()),
        changed(handles=(BlockHandle(100, 0),)),
        changed(handles=(BlockHandle(-1, 0),)),
        changed(handles=(BlockHandle(1, 0), BlockHandle(1, 1))),
        changed(handles=(BlockHandle(1, -1),)),
        changed(hello=hello_with(version=WIRE_VERSION + 1)),
        changed(hello=hello_with(block_bytes=0)),
        changed(hello=hello_with(node_id="")),
        changed(hello=hello_with(digest="most of it")),
        changed(hello=hello_with(addresses={str(number): b"" for number in range(9)})),
    ],
)
def test_malformed_tickets(data):
    with pytest.raises(TicketError):
        decode_ticket(data)


@pytest.mark.parametrize("hello", [hello_with(version=0), hello_with(epoch=-1), hello_with(num_blocks=0)])
def test_malformed_hellos(hello):
    with pytest.raises(HelloError):
        decode_hello(encode_hello(hello))


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_do_anything_but_decode_or_raise(noise, position, value):
    broken = bytearray(encode_ticket(TICKET))
    broken[position % len(broken)] = value
    for data in (noise, V + noise, bytes(broken), bytes(broken[:position])):
        try:
            ticket = decode_ticket(data)
        except TicketError:
            continue
        assert all(0 <= handle.block_id < ticket.hello.num_blocks for handle in ticket.handles)
        with pytest.raises(HelloError):
            decode_hello(data)
