"""What a connection came out on is known, told, and refused where something else is required."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.errors import PeerUnreachableError, TransportUnavailableError
from kvtransfer.events import PushFailed, ReceiveFailed
from kvtransfer.routes import Route, Routes, kind_of, satisfies
from kvtransfer.select import open_plane
from kvtransfer.ticket import PeerId
from kvtransfer.ucx import parse_lanes

SHARED_MEMORY = """
# UCP endpoint
#               peer: <no debug data>
#                 lane[0]:  2:sysv/memory.0 md[2]           -> md[2]/sysv/sysdev[255] seg 4294967295 am keepalive
#                 lane[1]:  4:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0
# |                          0..92 | eager short            | sysv/memory |
"""
INFINIBAND = """
#                 lane[0]:  5:rc_mlx5/mlx5_0:1.0 md[4]      -> md[4]/ib/sysdev[0] rma_bw#0 am am_bw#0
#                 lane[1]:  6:rc_mlx5/mlx5_1:1.0 md[5]      -> md[5]/ib/sysdev[1] rma_bw#1
#                 lane[2]:  0:tcp/eth0.0 md[0]              -> md[0]/tcp/sysdev[255] keepalive wireup
#                 lane[3]:  9:cuda_copy/cuda.0 md[9]        -> md[9]/cuda_cpy/sysdev[255] rma_bw#2
"""


@pytest.mark.parametrize(
    ("info", "lanes"),
    [
        (SHARED_MEMORY, "sysv+cma"),
        (INFINIBAND, "rc_mlx5+cuda_copy"),
        ("#   lane[0]:  0:tcp/lo.0 md[0]   -> md[0]/tcp/sysdev[255] seg 4294967295 am keepalive wireup\n", "tcp"),
        # a form without the uses of a lane: better one too many than a slow one that nobody sees
        ("#   lane[0]:  0:tcp/lo.0 md[0]   -> md[0]/tcp/sysdev[255]\n", "tcp"),
        ("# nothing here", ""),
    ],
)
def test_lanes_are_read_from_what_ucx_prints(info, lanes):
    assert parse_lanes(info) == lanes


@pytest.mark.parametrize(
    ("lanes", "kinds"),
    [
        ("posix+cma", {"shm"}),
        ("rc_mlx5", {"rdma"}),
        ("dc_mlx5+ud_verbs+gdr_copy", {"rdma"}),
        ("cuda_ipc+cuda_copy", {"cuda"}),
        ("tcp", {"tcp"}),
        ("rc_mlx5+tcp", set()),
        ("cuda_copy", set()),
        ("brand_new", set()),
        ("", set()),
    ],
)
def test_every_lane_must_be_of_the_required_kind(lanes, kinds):
    assert {kind for kind in ("rdma", "cuda", "shm", "tcp") if satisfies(lanes, kind)} == kinds


def test_an_unknown_transport_is_of_no_kind():
    assert kind_of("rcx") is None


def test_refusals_are_bounded_and_end_with_the_life():
    routes = Routes("rdma")
    peers = [PeerId("n", epoch) for epoch in range(300)]
    for peer in peers:
        assert "rdma is required" in (routes.connected(peer, Route(peer, "sending", "ucx", "tcp")) or "")
    assert len(routes.refused()) == 256
    assert routes.refusal(peers[0]) is None
    routes.forget(peers[-1])
    assert routes.refusal(peers[-1]) is None
    assert routes.open() == ()


@pytest.fixture
def over_tcp(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")


def test_ucx_over_tcp_serves_where_tcp_is_required(nodes, over_tcp, caplog):
    caplog.set_level("INFO", "kvtransfer.routes")
    p, d = nodes("ucx", "P", seed=1, require="tcp"), nodes("ucx", "D", require="tcp")
    ticket = d.grant([3], sender=p)
    p.plane.push(ticket, [(0, 1)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert np.array_equal(d.pool[3], p.pool[1])
    assert p.plane.stats().routes == (Route(PeerId("D", 1), "sending", "ucx", "tcp"),)
    assert d.plane.stats().routes == (Route(PeerId("P", 1), "receiving", "ucx", "tcp"),)
    told = [record.getMessage() for record in caplog.records]
    assert told.count("kv connection, sending: peer D, scheme ucx over tcp") == 1
    assert told.count("kv connection, receiving: peer P, scheme ucx over tcp") == 1
    d.plane.complete(ticket.ticket_id)


def test_ucx_over_tcp_is_refused_where_rdma_is_required(nodes, over_tcp, caplog):
    p, d = nodes("ucx", "P", seed=1, require="rdma"), nodes("ucx", "D")
    ticket = d.grant([3], sender=p)
    p.plane.push(ticket, [(0, 1)])
    failed = p.wait_kind(PushFailed, ticket.ticket_id)
    assert failed.reason == "the ucx connection with D came out on tcp, rdma is required"
    assert p.plane.refused() == {PeerId("D", 1): failed.reason}
    assert f"refused: {failed.reason}" in caplog.text
    # And no second connection is tried.
    with pytest.raises(PeerUnreachableError, match="rdma is required"):
        p.plane.push(ticket, [(0, 1)])
    assert not d.pool.any()
    assert p.plane.stats().routes == ()
    # Another life may be better.
    p.plane.peer_dead("D", 1)
    assert p.plane.refused() == {}


def test_the_receiver_refuses_for_itself(nodes, over_tcp):
    p, d = nodes("ucx", "P", seed=1), nodes("ucx", "D", require="rdma")
    ticket = d.grant([3, 4], sender=p)
    p.plane.push(ticket, [(0, 1), (1, 2)])
    failed = d.wait_kind(ReceiveFailed, ticket.ticket_id)
    assert failed.reason == "the ucx connection with P came out on tcp, rdma is required"
    p.wait_for(lambda: p.sent(ticket.ticket_id) == {0, 1})
    assert not d.pool.any()
    assert d.plane.refused() == {PeerId("P", 1): failed.reason}
    assert d.plane.stats().blocks_received == 0


def test_schemes_that_can_never_be_it_are_not_offered(nodes):
    p, d = nodes(["tcp", "inproc"], "P", require="shm"), nodes(["tcp"], "D")
    assert p.plane.schemes == ("inproc",)
    with pytest.raises(PeerUnreachableError, match="requires shm"):
        p.plane.push(d.grant([0]), [(0, 0)])
    assert "requires shm" in p.plane.refused()[PeerId("D", 1)]
    pool = np.zeros((4, 64), np.uint8)
    with pytest.raises(TransportUnavailableError, match="rdma is required, and tcp can never be that"):
        open_plane(["tcp"], pool, ("n", 1, "f"), secret=None, wakeup=lambda: None, require="rdma")


def test_tcp_and_its_end_are_told(nodes):
    p, d = nodes("tcp", "P", seed=1), nodes("tcp", "D")
    ticket = d.grant([3])
    p.plane.push(ticket, [(0, 1)])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert p.plane.stats().routes == (Route(PeerId("D", 1), "sending", "tcp", "tcp"),)
    d.close()
    p.wait_for(lambda: p.plane.stats().routes == ())
