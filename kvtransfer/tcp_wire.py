"""Bytes of the TCP road: addresses, the keyed handshake, the frame header. Pure: no socket, no clock.

Handshake, before any block (all integers big-endian):

    receiver -> sender   CHALLENGE  magic, version, receiver's nonce
    sender -> receiver   REPLY      magic, version, sender's id and epoch, its nonce, its MAC
    receiver -> sender   ACCEPT     magic, version, receiver's MAC

A MAC is HMAC-SHA256 under the shared secret over the role, both nonces, both ids and epochs and the receiver's
layout fingerprint: nobody proves anything without the secret, no answer can be reused or reflected, and a
restarted receiver on the same address is not mistaken for the old one. Then frames: `HEADER`, payload, ...
The handshake proves who is there; it does not encrypt.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

from kvtransfer.errors import HelloError
from kvtransfer.layout import WIRE_VERSION
from kvtransfer.proof import prove, proves
from kvtransfer.ticket import PeerId

MAGIC: Final = b"BKVT"
NONCE_BYTES: Final = 32
MAX_NODE_ID_BYTES: Final = 800

_GREETING: Final = struct.Struct(">4sB3x32s")  # CHALLENGE and ACCEPT: magic, version, nonce or MAC
_REPLY: Final = struct.Struct(">4sBxHQ32s32s")  # magic, version, id bytes, epoch, nonce, MAC; then the id
_HEADER: Final = struct.Struct(">4sIQIQQQ")  # magic, version, ticket id, index, generation, payload bytes, digest
GREETING_BYTES: Final = _GREETING.size
REPLY_BYTES: Final = _REPLY.size
HEADER_BYTES: Final = _HEADER.size


class WireError(Exception):
    """Bytes that no peer of ours sends; the connection is closed. Stays inside the TCP road."""


@dataclass(frozen=True)
class Header:
    """Names the block that follows: one block of ``length`` bytes for (ticket, index, generation)."""

    ticket_id: int
    index: int
    generation: int
    length: int
    digest: int


@dataclass(frozen=True)
class Reply:
    """The sender's claim to be ``peer``, until its MAC is checked."""

    node_id_bytes: int
    epoch: int
    nonce: bytes
    mac: bytes


@dataclass(frozen=True)
class Transcript:
    """All that both sides must agree on."""

    receiver_nonce: bytes
    sender_nonce: bytes
    sender: PeerId
    receiver: PeerId
    fingerprint: str

    def mac(self, role: bytes, secret: bytes | None) -> bytes:
        """``role`` is b"sender" or b"receiver"."""
        return prove(secret, *self._parts(role))

    def proves(self, role: bytes, secret: bytes | None, mac: bytes) -> bool:
        return proves(mac, secret, *self._parts(role))

    def _parts(self, role: bytes) -> tuple[bytes, ...]:
        return (
            b"baton-kv-tcp",
            role,
            self.receiver_nonce,
            self.sender_nonce,
            self.sender.node_id.encode(),
            self.sender.epoch.to_bytes(8, "big"),
            self.receiver.node_id.encode(),
            self.receiver.epoch.to_bytes(8, "big"),
            self.fingerprint.encode(),
        )


def pack_greeting(body: bytes) -> bytes:
    """The first message of each side: magic, version, nonce."""
    return _GREETING.pack(MAGIC, WIRE_VERSION, body)


def parse_greeting(data: bytes | bytearray) -> bytes:
    """The other side's nonce. Raises `WireError`."""
    magic, version, body = _GREETING.unpack(data)
    _check_magic(magic, version)
    return bytes(body)


def pack_reply(sender: PeerId, nonce: bytes, mac: bytes) -> bytes:
    """The sender's claim and its proof; the node id follows the fixed part."""
    node_id = sender.node_id.encode()
    return _REPLY.pack(MAGIC, WIRE_VERSION, len(node_id), sender.epoch, nonce, mac) + node_id


def parse_reply(data: bytes | bytearray) -> Reply:
    """The fixed part of a reply. Raises `WireError`."""
    magic, version, node_id_bytes, epoch, nonce, mac = _REPLY.unpack(data)
    _check_magic(magic, version)
    if not 0 < node_id_bytes <= MAX_NODE_ID_BYTES:
        raise WireError(f"node id of {node_id_bytes} bytes")
    return Reply(node_id_bytes, epoch, nonce, mac)


def parse_node_id(data: bytes | bytearray) -> str:
    """The node id behind a reply. Raises `WireError` for what is not UTF-8."""
    try:
        return bytes(data).decode()
    except UnicodeDecodeError as error:
        raise WireError("node id is not UTF-8") from error


def pack_header(header: Header) -> bytes:
    """What goes before each block."""
    fields = (header.ticket_id, header.index, header.generation, header.length, header.digest)
    return _HEADER.pack(MAGIC, WIRE_VERSION, *fields)


def parse_header(data: bytes | bytearray, block_bytes: int) -> Header:
    """Raises `WireError` also for a length that is not one block: it could only be an attack or a bug."""
    magic, version, ticket_id, index, generation, length, digest = _HEADER.unpack(data)
    _check_magic(magic, version)
    if length != block_bytes:
        raise WireError(f"frame of {length} bytes, blocks have {block_bytes}")
    return Header(ticket_id, index, generation, length, digest)


def format_address(host: str, port: int) -> bytes:
    """What a hello carries; IPv6 in brackets."""
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()


def parse_address(address: bytes) -> tuple[str, int]:
    """Numeric IP and port only: an address in a ticket never causes a name lookup. Raises `HelloError`."""
    try:
        host, _, port = address.decode("ascii").rpartition(":")
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except (UnicodeDecodeError, ValueError) as error:
        raise HelloError("not a TCP address") from error
    if not 0 < number < 1 << 16 or ip.is_unspecified or ip.is_multicast:
        raise HelloError("not a TCP address one can connect to")
    return str(ip), number


def connecting(address: bytes) -> socket.socket:
    """A socket on its way to a peer's address, non-blocking. Raises OSError if it cannot even set out."""
    host, port = parse_address(address)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex((host, port))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except OSError:
        sock.close()
        raise
    return sock


def _check_magic(magic: bytes, version: int) -> None:
    if magic != MAGIC or version != WIRE_VERSION:
        raise WireError("not our protocol, or another version of it")
