from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest
from kv_harness import Node

from kvtransfer import ucx
from kvtransfer.errors import HelloError, LayoutError, TransportUnavailableError
from kvtransfer.select import open_plane


def refuse(schemes, pool, error, **options) -> None:
    with pytest.raises(error):
        open_plane(schemes, pool, ("n", 1, "f"), **{"secret": None, "wakeup": lambda: None} | options)


def test_unfit_pools():
    pool = np.zeros((4, 64), np.uint8)
    frozen = pool.copy()
    frozen.setflags(write=False)
    for unfit in (pool[:, ::2], pool.T, frozen, pool.view(np.float32), pool[0], pool[:0]):
        refuse(["inproc"], unfit, LayoutError)


def test_unknown_or_unsafe_transports():
    pool = np.zeros((4, 64), np.uint8)
    refuse([], pool, TransportUnavailableError)
    refuse(["carrier pigeon"], pool, TransportUnavailableError)
    refuse(["tcp"], pool, TransportUnavailableError, host="0.0.0.0", secret=b"s")
    for scheme in ("tcp", "ucx"):
        # Documentation address: not loopback, and no secret.
        refuse([scheme], pool, TransportUnavailableError, host="192.0.2.1")
    refuse(["inproc", "tcp"], pool, TransportUnavailableError, host="192.0.2.1", secret=b"s")


def test_without_ucxx_the_error_says_so_and_tcp_works(monkeypatch, nodes):
    monkeypatch.setattr(ucx, "_vendor", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    refuse(["ucx"], np.zeros((4, 64), np.uint8), TransportUnavailableError)
    nodes("tcp", "n")


def carry(p: Node, d: Node) -> None:
    ticket = d.grant([0])
    p.plane.push(ticket, [(0, 0)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    d.plane.complete(ticket.ticket_id)


def test_the_best_common_scheme_is_taken(nodes):
    p = nodes(["tcp", "ucx", "inproc"], "P", seed=1)
    assert set(p.plane.hello().addresses) == {"tcp", "ucx", "inproc"}
    carry(p, nodes(["tcp"], "D1"))
    assert p.plane.stats().transport["ucx"] == "ucx, nothing sent yet"
    carry(p, nodes(["inproc", "tcp", "ucx"], "D2"))
    p.wait_for(lambda: p.plane.stats().transport["ucx"] != "ucx, nothing sent yet")


def test_withdraw_over_several_transports_is_answered_once(nodes):
    d = nodes(["tcp", "ucx", "inproc"], "D")
    ticket = d.grant([0, 1])
    d.plane.withdraw(ticket.ticket_id)
    d.wait_for(lambda: d.seen)
    assert len(d.seen) == 1


def test_a_garbled_ucx_address_never_reaches_ucx(nodes):
    p, d = nodes("ucx", "P"), nodes("ucx", "D")
    ticket = d.grant([0])
    address = bytearray(ticket.hello.addresses["ucx"])
    address[-1] ^= 1
    for bad in (bytes(address), b"", b"x" * 32):
        hello = msgspec.structs.replace(ticket.hello, addresses={"ucx": bad})
        with pytest.raises(HelloError):
            p.plane.push(msgspec.structs.replace(ticket, hello=hello), [(0, 0)])
