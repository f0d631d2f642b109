"""Keys that are over, and routers that are silent."""

from __future__ import annotations

from cluster.request import RequestId, RequestKey
from cluster.wire import Party
from engine.remembered import RouterWatch, Tombstones


def key(number: int) -> RequestKey:
    return RequestKey(RequestId("r"), number)


def test_only_the_oldest_tombstone_is_forgotten() -> None:
    tombstones = Tombstones(capacity=2)
    for number in (1, 2, 3):
        tombstones.add(key(number))
    assert [key(number) in tombstones for number in (1, 2, 3)] == [False, True, True]


def test_a_key_that_is_buried_again_counts_as_new() -> None:
    tombstones = Tombstones(capacity=2)
    for number in (1, 2, 1, 3):
        tombstones.add(key(number))
    assert [key(number) in tombstones for number in (1, 2, 3)] == [True, False, True]


def test_a_router_is_silent_once_and_only_after_the_limit() -> None:
    watch = RouterWatch(silence_s=10.0)
    talker, quiet = Party("R1", 1, "tcp://127.0.0.1:1"), Party("R2", 1, "tcp://127.0.0.1:2")
    watch.heard(talker, 0.0)
    watch.heard(quiet, 0.0)
    watch.heard(talker, 5.0)
    assert watch.take_silent(10.0) == []
    assert watch.take_silent(10.5) == [quiet]
    assert watch.take_silent(10.5) == []
    watch.heard(quiet, 11.0)
    assert watch.take_silent(15.5) == [talker]
    assert watch.take_silent(21.5) == [quiet]


def test_another_life_of_a_router_does_not_speak_for_the_first() -> None:
    watch = RouterWatch(silence_s=10.0)
    watch.heard(Party("R1", 1, "tcp://127.0.0.1:1"), 0.0)
    watch.heard(Party("R1", 2, "tcp://127.0.0.1:1"), 9.0)
    assert watch.take_silent(11.0) == [Party("R1", 1, "tcp://127.0.0.1:1")]
