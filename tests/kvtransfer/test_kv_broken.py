"""A transport whose thread ends by itself, which nothing should make it do, is found out and does no harm."""

from __future__ import annotations

import time

import pytest
from kv_harness import SCHEMES

from kvtransfer.errors import PlaneBrokenError
from kvtransfer.events import PushFailed


@pytest.mark.parametrize("scheme", sorted({*SCHEMES} - {"inproc"}))
def test_a_thread_that_ends_by_itself_is_no_secret(nodes, scheme, monkeypatch):
    p, d = nodes(scheme, "P", seed=1), nodes(scheme, "D")
    first = d.grant([0])
    p.plane.push(first, [(0, 0)])
    d.wait_for(lambda: d.arrived(first.ticket_id) == {0})
    d.plane.complete(first.ticket_id)
    p.plane.tick(time.monotonic())
    name = scheme.partition("-")[0]
    ticket, road = d.grant([1]), p.plane._roads[name]

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(road, "_turn", broken)
    p.plane.push(ticket, [(0, 1)])
    assert p.wait_kind(PushFailed, ticket.ticket_id)
    with pytest.raises(PlaneBrokenError, match=f"{name} ended by itself: a bug"):
        p.plane.tick(time.monotonic())
    late = d.grant([2])
    p.plane.push(late, [(0, 1)])
    assert p.wait_kind(PushFailed, late.ticket_id)
    for each in (ticket, late):
        d.plane.withdraw(each.ticket_id)
