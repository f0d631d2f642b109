"""Hellos and tickets: who a plane is, and its consent to receive exactly these blocks.

Both travel as a version byte followed by typed msgpack, inside control messages that other rooms carry. They
are read from the network, so every field has a bound and nothing but these types is ever built from them.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Final, NamedTuple

import msgspec

from kvtransfer.digest import DigestMode
from kvtransfer.errors import HelloError, TicketError
from kvtransfer.layout import WIRE_VERSION

# A UCX tag is 64 bits and has to name (ticket, block): 44 + 20. The highest index is kept for the transport.
TICKET_ID_BITS: Final = 44
INDEX_BITS: Final = 20
MAX_BLOCKS: Final = (1 << INDEX_BITS) - 1
MAX_HELLO_BYTES: Final = 64 << 10
MAX_TICKET_BYTES: Final = 4 << 20
_MAX_EPOCH: Final = (1 << 64) - 1


class PeerId(NamedTuple):
    """A life of a node: the same node restarted is another peer."""

    node_id: str
    epoch: int


class BlockHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One block of the receiver's pool, in the life ``generation`` of that block."""

    block_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    generation: Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a plane is and where it receives. ``addresses`` maps a scheme to that transport's own address.

    ``digest`` is what it asks of every block sent to it; the sender obeys.
    """

    version: int
    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    fingerprint: Annotated[str, msgspec.Meta(max_length=128)]
    block_bytes: Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]
    num_blocks: Annotated[int, msgspec.Meta(gt=0, le=1 << 32)]
    addresses: Annotated[
        dict[
            Annotated[str, msgspec.Meta(min_length=1, max_length=16)],
            Annotated[bytes, msgspec.Meta(max_length=32 << 10)],
        ],
        msgspec.Meta(max_length=8),
    ]
    digest: DigestMode

    @property
    def peer(self) -> PeerId:
        return PeerId(self.node_id, self.epoch)


class TransferTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A receiver's consent: block ``i`` of the transfer goes into ``handles[i]`` of its pool.

    ``ticket_id`` is random and unguessable: on a transport without a keyed handshake it is the capability.
    """

    ticket_id: Annotated[int, msgspec.Meta(ge=1, lt=1 << TICKET_ID_BITS)]
    hello: Hello
    handles: Annotated[tuple[BlockHandle, ...], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]


_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_ticket_decoder = msgspec.msgpack.Decoder(TransferTicket)
_VERSION_BYTE: Final = bytes([WIRE_VERSION])


def new_ticket_id() -> int:
    """A random ticket number, never 0, that fits the tag of every transport."""
    return secrets.randbelow((1 << TICKET_ID_BITS) - 1) + 1


def encode_hello(hello: Hello) -> bytes:
    """Raises `HelloError` if it is over `MAX_HELLO_BYTES`."""
    data = _VERSION_BYTE + _encoder.encode(hello)
    if len(data) > MAX_HELLO_BYTES:
        raise HelloError(f"hello of {len(data)} bytes is over the cap of {MAX_HELLO_BYTES}")
    return data


def decode_hello(data: bytes) -> Hello:
    """Raises `HelloError` for anything but a well-formed hello of our version."""
    if not 1 < len(data) <= MAX_HELLO_BYTES or data[0] != WIRE_VERSION:
        raise HelloError(f"{len(data)} bytes are not a hello of version {WIRE_VERSION}")
    try:
        hello = _hello_decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HelloError(str(error)) from error
    _check_hello(hello)
    return hello


def encode_ticket(ticket: TransferTicket) -> bytes:
    """Raises `TicketError` if it is over `MAX_TICKET_BYTES`."""
    data = _VERSION_BYTE + _encoder.encode(ticket)
    if len(data) > MAX_TICKET_BYTES:
        raise TicketError(f"ticket of {len(data)} bytes is over the cap of {MAX_TICKET_BYTES}")
    return data


def decode_ticket(data: bytes) -> TransferTicket:
    """Raises `TicketError` for anything but a well-formed ticket of our version with distinct, existing blocks."""
    if not 1 < len(data) <= MAX_TICKET_BYTES or data[0] != WIRE_VERSION:
        raise TicketError(f"{len(data)} bytes are not a ticket of version {WIRE_VERSION}")
    try:
        ticket = _ticket_decoder.decode(memoryview(data)[1:])
        _check_hello(ticket.hello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, HelloError) as error:
        raise TicketError(str(error)) from error
    check_handles(ticket.handles, ticket.hello.num_blocks)
    return ticket


def check_handles(handles: tuple[BlockHandle, ...], num_blocks: int) -> None:
    """Raises `TicketError` unless there are 1 to `MAX_BLOCKS` handles of distinct blocks of a pool of that size."""
    if not 1 <= len(handles) <= MAX_BLOCKS:
        raise TicketError(f"a ticket names 1 to {MAX_BLOCKS} blocks, not {len(handles)}")
    if len({handle.block_id for handle in handles}) != len(handles):
        raise TicketError("a ticket names a block twice")
    if any(not 0 <= handle.block_id < num_blocks for handle in handles):
        raise TicketError(f"a ticket names a block outside a pool of {num_blocks}")


def _check_hello(hello: Hello) -> None:
    if hello.version != WIRE_VERSION:
        raise HelloError(f"hello of version {hello.version}, expected {WIRE_VERSION}")
    if hello.epoch > _MAX_EPOCH:
        raise HelloError("epoch does not fit 64 bits")
