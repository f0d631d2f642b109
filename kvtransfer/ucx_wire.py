"""What the UCX road says besides blocks: its address in a hello, and who is pushing a ticket. Pure."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvtransfer.errors import HelloError
from kvtransfer.proof import prove, proves
from kvtransfer.road import RoadContext
from kvtransfer.ticket import INDEX_BITS, PeerId

# Never a block: a ticket holds at most this many.
INTRODUCTION_INDEX: Final = (1 << INDEX_BITS) - 1
MAX_INTRODUCTION_BYTES: Final = 2048
_PROOF_BYTES: Final = 32


class _Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """First message of a push. A block of a ticket nobody introduced himself for is refused."""

    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    proof: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Introduction)


def introduce(context: RoadContext, ticket_id: int, receiver: PeerId) -> bytes:
    proof = prove(context.secret, *_parts(context, ticket_id, context.me, receiver))
    return _encoder.encode(_Introduction(context.me.node_id, context.me.epoch, proof))


def read_introduction(context: RoadContext, ticket_id: int, data: bytes) -> PeerId | None:
    """Who pushes this ticket; None for anything but a proven introduction to us."""
    try:
        said = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if said.epoch >= 1 << 64:
        return None
    peer = PeerId(said.node_id, said.epoch)
    parts = _parts(context, ticket_id, peer, context.me)
    return peer if proves(said.proof, context.secret, *parts) else None


def seal_address(secret: bytes | None, address: bytes) -> bytes:
    """UCX does not survive a garbled address, so ours carry a proof."""
    return prove(secret, b"baton-kv-ucx-address", address) + address


def open_address(secret: bytes | None, sealed: bytes) -> bytes:
    """Raises `HelloError`."""
    proof, address = sealed[:_PROOF_BYTES], sealed[_PROOF_BYTES:]
    if not address or not proves(proof, secret, b"baton-kv-ucx-address", address):
        raise HelloError("not a UCX address, or made with another secret")
    return address


def _parts(context: RoadContext, ticket_id: int, sender: PeerId, receiver: PeerId) -> tuple[bytes, ...]:
    return (
        b"baton-kv-ucx",
        ticket_id.to_bytes(8, "big"),
        sender.node_id.encode(),
        sender.epoch.to_bytes(8, "big"),
        receiver.node_id.encode(),
        receiver.epoch.to_bytes(8, "big"),
        context.fingerprint.encode(),
    )
