"""What the UCX road says besides blocks: its address, who is pushing which blocks, which worker is gone. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from kvtransfer.errors import HelloError
from kvtransfer.proof import prove, proves
from kvtransfer.road import RoadContext
from kvtransfer.ticket import INDEX_BITS, PeerId

# No ticket has this number: a message of it is a farewell.
FAREWELL_TICKET: Final = 0

# Never a block: a ticket holds at most this many.
INTRODUCTION_INDEX: Final = (1 << INDEX_BITS) - 1
# Small enough to arrive whole with its first packet.
MAX_NOTE_BYTES: Final = 4096
_PROOF_BYTES: Final = 32
_MAX_REPLY_TO_BYTES: Final = 3072
_MAX_DIGESTS: Final = 64
_DIGEST: Final = struct.Struct(">IQ")  # index, digest


class _Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes ahead of blocks. A block of a ticket nobody introduced himself for is refused.

    ``reply_to`` is the sealed address of the sender's sending worker, for a farewell; empty if told already or too
    long. ``digests`` are packed pairs (index, digest) of the blocks that follow.
    """

    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    reply_to: Annotated[bytes, msgspec.Meta(max_length=_MAX_REPLY_TO_BYTES)]
    digests: Annotated[bytes, msgspec.Meta(max_length=_DIGEST.size * _MAX_DIGESTS)]
    proof: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]


class _Farewell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A receiver destroyed the worker of this address: what was posted to it is neither read nor answered.

    Over shared memory UCX notices the death of a process, but not of a worker, and such a send never ends.
    """

    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    worker: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]
    proof: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]


@dataclass(frozen=True)
class Introduced:
    """A sender, the sealed address it can be told at (may be empty), and the digests of its next blocks by index."""

    peer: PeerId
    reply_to: bytes
    digests: Mapping[int, int]


_encoder = msgspec.msgpack.Encoder()
_introduction_decoder = msgspec.msgpack.Decoder(_Introduction)
_farewell_decoder = msgspec.msgpack.Decoder(_Farewell)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def num_introduced(reply_to: bytes) -> int:
    """How many blocks fit into one introduction, beside ``reply_to``."""
    return max(1, min(_MAX_DIGESTS, (_MAX_REPLY_TO_BYTES - len(reply_to)) // _DIGEST.size))


def introduce(
    context: RoadContext, ticket_id: int, receiver: PeerId, reply_to: bytes, digests: Mapping[int, int]
) -> bytes:
    """What goes ahead of blocks: who sends and what they hold, proven with the secret.

    ``reply_to`` is our own sealed address; ``digests`` are at most `num_introduced`, by index in the ticket.
    """
    me = context.me
    if len(reply_to) > _MAX_REPLY_TO_BYTES:
        reply_to = b""
    packed = b"".join(_DIGEST.pack(index, digest) for index, digest in digests.items())
    proof = prove(context.secret, *_parts(context, b"introduction", ticket_id, me, receiver), reply_to, packed)
    return _encoder.encode(_Introduction(me.node_id, me.epoch, reply_to, packed, proof))


def read_introduction(context: RoadContext, ticket_id: int, data: bytes) -> Introduced | None:
    """Who pushes this ticket; None for anything but a proven introduction to us."""
    try:
        said = _introduction_decoder.decode(data)
        peer = PeerId(said.node_id, said.epoch)
        parts = _parts(context, b"introduction", ticket_id, peer, context.me)
    except _UNREADABLE:
        return None
    if not proves(said.proof, context.secret, *parts, said.reply_to, said.digests):
        return None
    if len(said.digests) % _DIGEST.size:
        return None
    return Introduced(peer, said.reply_to, dict(_DIGEST.iter_unpack(said.digests)))


def farewell(context: RoadContext, sender: PeerId, worker: bytes) -> bytes:
    """Tells ``sender`` that our worker with this sealed address is gone."""
    me, name = context.me, worker[:_PROOF_BYTES]
    proof = prove(context.secret, *_parts(context, b"farewell", 0, sender, me), name)
    return _encoder.encode(_Farewell(me.node_id, me.epoch, name, proof))


def read_farewell(context: RoadContext, data: bytes) -> bytes | None:
    """The name (see `worker_name`) of the worker that is gone; None for anything but a proven farewell to us."""
    try:
        said = _farewell_decoder.decode(data)
        parts = _parts(context, b"farewell", 0, context.me, PeerId(said.node_id, said.epoch))
    except _UNREADABLE:
        return None
    return said.worker if proves(said.proof, context.secret, *parts, said.worker) else None


def worker_name(sealed: bytes) -> bytes:
    """How a farewell names a worker: the beginning of its sealed address, which is random."""
    return sealed[:_PROOF_BYTES]


def seal_address(secret: bytes | None, address: bytes) -> bytes:
    """UCX does not survive a garbled address, so ours carry a proof."""
    return prove(secret, b"baton-kv-ucx-address", address) + address


def open_address(secret: bytes | None, sealed: bytes) -> bytes:
    """Raises `HelloError`."""
    proof, address = sealed[:_PROOF_BYTES], sealed[_PROOF_BYTES:]
    if not address or not proves(proof, secret, b"baton-kv-ucx-address", address):
        raise HelloError("not a UCX address, or made with another secret")
    return address


def _parts(context: RoadContext, kind: bytes, ticket_id: int, sender: PeerId, receiver: PeerId) -> tuple[bytes, ...]:
    return (
        b"baton-kv-ucx",
        kind,
        ticket_id.to_bytes(8, "big"),
        sender.node_id.encode(),
        sender.epoch.to_bytes(8, "big"),
        receiver.node_id.encode(),
        receiver.epoch.to_bytes(8, "big"),
        context.fingerprint.encode(),
    )
