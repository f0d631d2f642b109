"""Control messages as bytes: typed msgpack, never pickle.

A frame is one version byte followed by a msgpack-encoded :class:`Envelope`. Frames over
:data:`MAX_FRAME_BYTES`, of another version, or that do not match the types of ``cluster/wire.py`` exactly raise
:class:`WireError` and are counted and dropped by the channel; nothing else in the program parses bytes from a socket.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from cluster.wire import Epoch, Message, Party

WIRE_VERSION: Final = 4
MAX_FRAME_BYTES: Final = 8 << 20


class WireError(Exception):
    """Bytes that are not one of our messages."""


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``to_epoch`` names the life of the receiver the message is meant for; another life drops it."""

    sender: Party
    to_epoch: Epoch
    body: Message


class _Received(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An :class:`Envelope` whose sender is still bytes."""

    sender: msgspec.Raw
    to_epoch: Epoch
    body: Message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Received)
_party_decoder = msgspec.msgpack.Decoder(Party)


def encode(envelope: Envelope) -> bytes:
    """Frame an envelope. Raises :class:`WireError` if it is over the size cap."""
    frame = bytes([WIRE_VERSION]) + _encoder.encode(envelope)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"message of {len(frame)} bytes is over the cap of {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> Envelope:
    """Parse a frame. Raises :class:`WireError` for anything but a well-formed message of our version."""
    if not frame or len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes refused")
    if frame[0] != WIRE_VERSION:
        raise WireError(f"wire version {frame[0]}, expected {WIRE_VERSION}")
    try:
        received = _decoder.decode(memoryview(frame)[1:])
        return Envelope(_party(bytes(received.sender)), received.to_epoch, received.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from error


@lru_cache(maxsize=1024)
def _party(encoded: bytes) -> Party:
    """Whom these bytes name. A sender names itself by the same ones in each message, and to match their patterns takes
    longer than all the rest of most messages. Bounded: a valid name has a few hundred bytes.
    """
    return _party_decoder.decode(encoded)
