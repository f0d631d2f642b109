"""What the NIXL road says on its socket: frames of typed msgpack, each behind its length. No block goes over it.

    receiver -> sender   Challenge  a nonce
    sender -> receiver   Reply      who it is, its nonce, its MAC
    receiver -> sender   Welcome    its MAC; its agent's metadata and where its pool lies, under a MAC too

as on the TCP road (`kvtransfer.tcp_wire`), and then, for each ticket:

    sender -> receiver   Ask        may I write these blocks, which will have these digests?
    receiver -> sender   Allow      these you may; the others are not wanted
    sender -> receiver   Landed     these have been written, the last byte of each
    sender -> receiver   Released   these I was allowed to write, and will not
    receiver -> sender   Stop       I withdraw: write no more of them, and release what you have not begun

So a receiver consents to every block before its sender touches it, although the transport would let it in without.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvtransfer.layout import WIRE_VERSION
from kvtransfer.nixl import Region
from kvtransfer.tcp_wire import NONCE_BYTES, WireError
from kvtransfer.ticket import INDEX_BITS, TICKET_ID_BITS

MAX_FRAME_BYTES: Final = 4 << 20
# So many fit into a frame, with room to spare.
MAX_ASKED: Final = 1 << 16
# The role in a sender's MAC.
SENDER_ROLE: Final = b"nixl-sender"
_LENGTH: Final = struct.Struct(">I")

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
Unsigned = Annotated[int, Meta(ge=0, lt=(1 << 63) - 1)]
TicketId = Annotated[int, Meta(ge=1, lt=1 << TICKET_ID_BITS)]
Index = Annotated[int, Meta(ge=0, lt=1 << INDEX_BITS)]
Indexes = Annotated[tuple[Index, ...], Meta(max_length=MAX_ASKED)]


class Challenge(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The first frame."""

    version: Annotated[int, Meta(ge=WIRE_VERSION, le=WIRE_VERSION)]
    nonce: Nonce


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The sender's claim to be (node id, epoch), and its proof."""

    node_id: Annotated[str, Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, Meta(ge=0)]
    nonce: Nonce
    mac: Mac


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """The receiver's proof, which covers the rest: NIXL trusts metadata, so nobody else's must reach it."""

    mac: Mac
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    base: Unsigned
    block_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]
    num_blocks: Annotated[int, Meta(ge=1, lt=1 << 32)]

    @property
    def region(self) -> Region:
        """Where the receiver's pool lies."""
        return Region(self.base, self.block_bytes, self.num_blocks)


class Wish(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One block of a ticket, and what it will hold."""

    index: Index
    generation: Unsigned
    digest: Annotated[int, Meta(ge=0)]


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """See the module."""

    ticket_id: TicketId
    wishes: Annotated[tuple[Wish, ...], Meta(max_length=MAX_ASKED)]


class Allow(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """See the module. Answers one Ask: every index of it is in one of the two."""

    ticket_id: TicketId
    allowed: Indexes
    refused: Indexes


class Landed(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """See the module."""

    ticket_id: TicketId
    indexes: Indexes


class Released(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """See the module."""

    ticket_id: TicketId
    indexes: Indexes


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """See the module."""

    ticket_id: TicketId


ToSender = Challenge | Welcome | Allow | Stop
ToReceiver = Reply | Ask | Landed | Released

_encoder = msgspec.msgpack.Encoder()
_for_sender = msgspec.msgpack.Decoder(ToSender)
_for_receiver = msgspec.msgpack.Decoder(ToReceiver)


def receiver_role(metadata: bytes, region: Region) -> bytes:
    """The role in a receiver's MAC, which covers what the sender will believe."""
    where = struct.pack(">QQQ", region.base, region.block_bytes, region.num_blocks)
    return b"nixl-receiver" + where + metadata


def frame(message: ToSender | ToReceiver) -> bytes:
    """The bytes of a message."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into messages. ``to_sender``: which direction it reads."""

    def __init__(self, *, to_sender: bool) -> None:
        self._to_sender = to_sender
        self._have = bytearray()

    def feed(self, data: bytes) -> list[ToSender | ToReceiver]:
        """Messages that are complete now. Raises `WireError` for anything that no peer of ours sends."""
        self._have += data
        found: list[ToSender | ToReceiver] = []
        while len(self._have) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._have)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"frame of {length} bytes")
            if len(self._have) < _LENGTH.size + length:
                break
            found.append(self._decode(bytes(self._have[_LENGTH.size : _LENGTH.size + length])))
            del self._have[: _LENGTH.size + length]
        return found

    def _decode(self, data: bytes) -> ToSender | ToReceiver:
        try:
            return _for_sender.decode(data) if self._to_sender else _for_receiver.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise WireError(f"not one of our messages: {error}") from error
