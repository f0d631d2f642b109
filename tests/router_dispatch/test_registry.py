"""The life of nodes in the router's eyes, with a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.channel import ChannelError
from cluster.membership import NodeRecord, Role
from cluster.wire import Message, NodeLoad, Party, PeerDown, Ping, Pong
from router.registry import DEAD_AFTER_S, PING_S, SUSPECT_AFTER_S, NodeRegistry

LOAD = NodeLoad(num_running=3)


@dataclass
class Wire:
    """A channel that remembers, and cannot reach the ``unreachable``."""

    sent: list[tuple[Party, Message]] = field(default_factory=list)
    forgotten: list[Party] = field(default_factory=list)
    unreachable: set[Party] = field(default_factory=set)

    def send(self, party: Party, message: Message) -> None:
        if party in self.unreachable:
            raise ChannelError("no way")
        self.sent.append((party, message))

    def forget(self, party: Party) -> None:
        self.forgotten.append(party)


class Eyes:
    """A registry and what it told others."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.lost: list[Party] = []
        self.dead: list[Party] = []
        self.changes = 0
        self.registry = NodeRegistry(
            None,  # type: ignore[arg-type]
            self.wire,  # type: ignore[arg-type]
            on_lost=self.lost.append,
            on_dead=self.dead.append,
            on_change=self._changed,
        )
        self.now = 100.0

    def _changed(self) -> None:
        self.changes += 1

    def see(self, *records: NodeRecord) -> None:
        self.registry.take_records(records, self.now)

    def pong(self, *parties: Party) -> None:
        for party in parties:
            self.registry.on_pong(party, Pong(1, LOAD), self.now)

    def run_for(self, seconds: float, *answering: Party) -> None:
        """Time passes as the ping loop sees it."""
        end = self.now + seconds
        while self.now < end:
            self.now += PING_S
            self.pong(*answering)
            self.registry.check_silence(self.now)

    def names(self, role: Role = "decode") -> list[str]:
        return [node.party.id for node in self.registry.nodes(role)]


def record(name: str, epoch: int = 1, role: Role = "decode", port: int = 4000, **more: Any) -> NodeRecord:
    options = {"fingerprint": "f", "block_size": 16, "num_blocks": 64, "max_model_len": 512, "transports": ("tcp",)}
    party = Party(name, epoch, f"tcp://127.0.0.1:{port}")
    return NodeRecord(role=role, party=party, http_address="http://127.0.0.1:1", **{**options, **more})


A, B, P = record("a"), record("b"), record("p", role="prefill")


@pytest.fixture
def eyes() -> Eyes:
    return Eyes()


def test_a_node_is_used_once_it_has_answered(eyes: Eyes) -> None:
    eyes.see(B, A, P)
    assert eyes.names() == []
    assert eyes.registry.is_one_joining(eyes.now)
    eyes.pong(P.party, B.party, A.party)
    assert eyes.names() == ["a", "b"]
    assert eyes.names("prefill") == ["p"]
    assert not eyes.registry.is_one_joining(eyes.now)
    assert eyes.changes == 3
    entry = eyes.registry.get(A.party)
    assert entry is not None
    assert entry.load == LOAD


def test_silence_makes_suspect_and_an_answer_makes_good(eyes: Eyes) -> None:
    eyes.see(A, B)
    eyes.pong(A.party, B.party)
    changes = eyes.changes
    eyes.run_for(SUSPECT_AFTER_S + PING_S, B.party)
    assert eyes.names() == ["b"]
    assert eyes.lost == [A.party]
    assert eyes.changes > changes
    eyes.run_for(2.0, B.party)
    assert eyes.lost == [A.party], "told once"
    eyes.pong(A.party)
    assert eyes.names() == ["a", "b"]
    assert eyes.dead == []
    eyes.run_for(SUSPECT_AFTER_S + PING_S, B.party)
    assert eyes.lost == [A.party, A.party], "and once more if it happens again"


def test_long_silence_is_death(eyes: Eyes) -> None:
    eyes.see(A, B)
    eyes.pong(A.party, B.party)
    eyes.run_for(DEAD_AFTER_S + PING_S, B.party)
    assert eyes.lost == eyes.dead == [A.party]
    assert eyes.registry.get(A.party) is None
    down = PeerDown("a", 1)
    assert [to for to, message in eyes.wire.sent if message == down] == [A.party, B.party], "it too is told"
    assert eyes.wire.forgotten == [A.party]
    eyes.see(A)
    eyes.pong(A.party)
    assert eyes.names() == ["b"], "that life is over, whatever Redis still lists"
    eyes.see(record("a", epoch=2))
    eyes.pong(Party("a", 2, A.party.address))
    assert eyes.names() == ["a", "b"]
    eyes.see(A)
    assert eyes.dead == [A.party], "an old record does not end the new life"


def test_every_life_that_is_over_stays_over(eyes: Eyes) -> None:
    for epoch in (1, 2, 3):
        eyes.see(record("a", epoch))
        eyes.pong(Party("a", epoch, A.party.address))
    assert [party.epoch for party in eyes.dead] == [1, 2]
    eyes.see(record("a", 1), record("a", 2))
    assert [party.epoch for party in eyes.dead] == [1, 2]
    assert eyes.registry.nodes("decode")[0].party.epoch == 3


def test_a_node_that_never_answered_is_no_death(eyes: Eyes) -> None:
    """This router may be the one that is cut off: nobody is told to drop the node, and it may join later."""
    eyes.see(A, B)
    eyes.pong(B.party)
    eyes.run_for(SUSPECT_AFTER_S, B.party)
    assert not eyes.registry.is_one_joining(eyes.now)
    eyes.run_for(DEAD_AFTER_S, B.party)
    assert eyes.registry.get(A.party) is None
    assert eyes.lost == eyes.dead == []
    assert not any(isinstance(message, PeerDown) for _to, message in eyes.wire.sent)
    eyes.see(A)
    eyes.pong(A.party)
    assert eyes.names() == ["a", "b"]


def test_the_routers_own_absence_is_not_the_nodes_silence(eyes: Eyes) -> None:
    eyes.see(A, B)
    eyes.pong(A.party, B.party)
    eyes.run_for(1.0, A.party, B.party)
    eyes.now += 60.0  # stopped, swapped out, or a laptop's lid
    eyes.registry.check_silence(eyes.now)
    assert eyes.names() == ["a", "b"]
    eyes.run_for(SUSPECT_AFTER_S + PING_S, B.party)
    assert eyes.lost == [A.party], "from now on silence counts again"


def test_a_life_keeps_its_address(eyes: Eyes) -> None:
    """Redis content that names another address for a life we know is no reason to end it, or to talk to that."""
    eyes.see(A)
    eyes.pong(A.party)
    elsewhere = record("a", port=666, num_blocks=1)
    eyes.see(elsewhere)
    assert eyes.names() == ["a"]
    assert eyes.registry.nodes("decode")[0].record == A
    assert eyes.dead == []
    assert eyes.registry.get(elsewhere.party) is None
    heard = eyes.registry.nodes("decode")[0].heard_s
    eyes.now += 1.0
    eyes.pong(elsewhere.party)
    assert eyes.registry.nodes("decode")[0].heard_s == heard, "whoever that is, it is not our node"


def test_a_node_that_redis_forgot_stays_while_it_answers(eyes: Eyes) -> None:
    eyes.see(A)
    eyes.pong(A.party)
    eyes.see()
    eyes.run_for(60.0, A.party)
    assert eyes.names() == ["a"]


def test_strangers_are_not_heard(eyes: Eyes) -> None:
    eyes.pong(A.party)
    eyes.see(record("a", epoch=2))
    eyes.pong(A.party)
    assert eyes.names() == []


def test_what_cannot_be_reached_hinders_nobody(eyes: Eyes) -> None:
    eyes.wire.unreachable.add(A.party)
    eyes.see(A, B)
    eyes.pong(A.party, B.party)
    eyes.registry._tell(Ping(1), [A.party, B.party])
    assert eyes.wire.sent == [(B.party, Ping(1))]
    eyes.run_for(DEAD_AFTER_S + PING_S, B.party)
    assert eyes.dead == [A.party]


def test_the_memory_of_the_dead_is_bounded(eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.registry.MAX_DEAD", 5)
    for epoch in range(50):
        eyes.see(record("a", epoch))
        eyes.pong(Party("a", epoch, A.party.address))
    assert len(eyes.registry._dead) == 5
