"""What the UCX road says besides blocks: its address, who pushes which blocks, what became of them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from kvtransfer.errors import HelloError
from kvtransfer.proof import prove, proves
from kvtransfer.road import RoadContext
from kvtransfer.shared_memory import MemoryName, unpack_name
from kvtransfer.ticket import INDEX_BITS, PeerId

# No ticket has this number: a message of it is a receiver's reply.
REPLY_TICKET: Final = 0
# A word to a worker of our own, to find out whether it hears.
HEARING_TAG: Final = REPLY_TICKET << INDEX_BITS | 1
# No offer has this number: blocks that follow as messages.
NO_OFFER: Final = 0
# No block has this number: what is sent was put together elsewhere.
NO_SOURCE: Final = (1 << 32) - 1

# Never a block: a ticket holds at most this many.
INTRODUCTION_INDEX: Final = (1 << INDEX_BITS) - 1
# Small enough to arrive whole with its first packet.
MAX_NOTE_BYTES: Final = 4096
_PROOF_BYTES: Final = 32
_MAX_REPLY_TO_BYTES: Final = 3072
_MAX_BLOCKS: Final = 64
_MAX_MEMORY_BYTES: Final = 64
_BLOCK: Final = struct.Struct(">IQI")  # position, digest, source


# What became of an offer: its blocks were copied, or nobody wanted them, or they must be sent.
Outcome = Literal["copied", "unwanted", "unreadable"]


class _Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes ahead of blocks. A block of a ticket nobody introduced himself for is refused.

    ``reply_to`` is the sealed address of the sender's sending worker, for replies; empty if told already or too
    long. ``blocks`` are packed `IntroducedBlock`. With an ``offer`` they do not follow, but lie in the sender's
    ``memory`` (a packed `MemoryName`) until the receiver says what became of the offer.
    """

    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    reply_to: Annotated[bytes, msgspec.Meta(max_length=_MAX_REPLY_TO_BYTES)]
    blocks: Annotated[bytes, msgspec.Meta(max_length=_BLOCK.size * _MAX_BLOCKS)]
    memory: Annotated[bytes, msgspec.Meta(max_length=_MAX_MEMORY_BYTES)]
    offer: Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]
    proof: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]


class _Farewell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="farewell"):
    """A receiver destroyed the worker of this address: what was posted to it is neither read nor answered.

    Over shared memory UCX notices the death of a process, but not of a worker, and such a send never ends.
    """

    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    worker: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]
    proof: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="answer"):
    """The receiver reads the blocks of this offer no more."""

    node_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    offer: Annotated[int, msgspec.Meta(gt=0, lt=(1 << 63) - 1)]
    outcome: Outcome
    proof: Annotated[bytes, msgspec.Meta(max_length=_PROOF_BYTES)]


class IntroducedBlock(NamedTuple):
    """What this position of the ticket will hold, and which of the sender's blocks that is (or `NO_SOURCE`)."""

    position: int
    digest: int
    source: int


@dataclass(frozen=True)
class Introduced:
    """A sender, the sealed address it can be told at (may be empty), and its next blocks.

    They lie in its ``memory``, if they are an ``offer``.
    """

    peer: PeerId
    reply_to: bytes
    blocks: tuple[IntroducedBlock, ...]
    memory: MemoryName | None
    offer: int

    @property
    def digests(self) -> Mapping[int, int]:
        """By position in the ticket."""
        return {block.position: block.digest for block in self.blocks}


@dataclass(frozen=True, slots=True)
class Gone:
    """A receiver's worker of this name (see `worker_name`) was destroyed."""

    worker: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """``peer`` will not read the blocks of this offer (again)."""

    peer: PeerId
    offer: int
    outcome: Outcome


_encoder = msgspec.msgpack.Encoder()
_introduction_decoder = msgspec.msgpack.Decoder(_Introduction)
_reply_decoder = msgspec.msgpack.Decoder(_Farewell | _Answer)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def num_introduced(reply_to: bytes) -> int:
    """How many blocks fit into one introduction, beside ``reply_to``."""
    return max(1, min(_MAX_BLOCKS, (_MAX_REPLY_TO_BYTES - len(reply_to)) // _BLOCK.size))


def can_be_told(reply_to: bytes) -> bool:
    """Whether this address fits into an introduction; who makes an offer needs an answer."""
    return len(reply_to) <= _MAX_REPLY_TO_BYTES


def introduce(
    context: RoadContext,
    ticket_id: int,
    receiver: PeerId,
    reply_to: bytes,
    blocks: Sequence[IntroducedBlock],
    offer: int = NO_OFFER,
) -> bytes:
    """What goes ahead of blocks, or offers them: who sends and what they hold, proven with the secret.

    ``reply_to`` is our own sealed address; ``blocks`` are at most `num_introduced`.
    """
    me = context.me
    if not can_be_told(reply_to):
        reply_to = b""
    packed = b"".join(_BLOCK.pack(*block) for block in blocks)
    memory = context.memory.name.pack() if offer and context.memory is not None else b""
    said = (reply_to, packed, memory, offer.to_bytes(8, "big"))
    proof = prove(context.secret, *_parts(context, b"introduction", ticket_id, me, receiver), *said)
    return _encoder.encode(_Introduction(me.node_id, me.epoch, reply_to, packed, memory, offer, proof))


def read_introduction(context: RoadContext, ticket_id: int, data: bytes) -> Introduced | None:
    """Who pushes this ticket; None for anything but a proven introduction to us."""
    try:
        said = _introduction_decoder.decode(data)
        peer = PeerId(said.node_id, said.epoch)
        parts = _parts(context, b"introduction", ticket_id, peer, context.me)
    except _UNREADABLE:
        return None
    parts += (said.reply_to, said.blocks, said.memory, said.offer.to_bytes(8, "big"))
    if not proves(said.proof, context.secret, *parts) or len(said.blocks) % _BLOCK.size:
        return None
    blocks = tuple(map(IntroducedBlock._make, _BLOCK.iter_unpack(said.blocks)))
    return Introduced(peer, said.reply_to, blocks, unpack_name(said.memory), said.offer)


def farewell(context: RoadContext, sender: PeerId, worker: bytes) -> bytes:
    """Tells ``sender`` that our worker with this sealed address is gone."""
    me, name = context.me, worker[:_PROOF_BYTES]
    proof = prove(context.secret, *_parts(context, b"farewell", 0, sender, me), name)
    return _encoder.encode(_Farewell(me.node_id, me.epoch, name, proof))


def answer(context: RoadContext, sender: PeerId, offer: int, outcome: Outcome) -> bytes:
    """Tells ``sender`` what became of its offer."""
    me = context.me
    parts = _answer_parts(context, sender, me, offer, outcome)
    return _encoder.encode(_Answer(me.node_id, me.epoch, offer, outcome, prove(context.secret, *parts)))


def read_reply(context: RoadContext, data: bytes) -> Gone | Answer | None:
    """What a receiver says to us; None for anything that is not proven."""
    try:
        said = _reply_decoder.decode(data)
        receiver = PeerId(said.node_id, said.epoch)
        if isinstance(said, _Farewell):
            parts = (*_parts(context, b"farewell", 0, context.me, receiver), said.worker)
            return Gone(said.worker) if proves(said.proof, context.secret, *parts) else None
        parts = _answer_parts(context, context.me, receiver, said.offer, said.outcome)
    except _UNREADABLE:
        return None
    return Answer(receiver, said.offer, said.outcome) if proves(said.proof, context.secret, *parts) else None


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


def _answer_parts(
    context: RoadContext, sender: PeerId, receiver: PeerId, offer: int, outcome: Outcome
) -> tuple[bytes, ...]:
    return (*_parts(context, b"answer", 0, sender, receiver), offer.to_bytes(8, "big"), outcome.encode())
