"""Which nodes this router may use now: found through Redis, believed only while they answer.

A node's life has three stages here. *alive*: it answered a ping within :data:`SUSPECT_AFTER_S`. *suspect*: it did
not, so it gets no new request and those in flight there end with an error; it is alive again when it answers.
*dead*: silent for :data:`DEAD_AFTER_S`, or another epoch took its place; that life is never used again and every
other node is told to drop it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.channel import Channel, ChannelError
from cluster.membership import Membership, MembershipError, NodeRecord, Role
from cluster.wire import NodeLoad, Party, PeerDown, Ping, Pong, RefusedPeer
from router.pairing import why_apart

log = logging.getLogger(__name__)

PING_S = 0.25
SUSPECT_AFTER_S = 1.5
DEAD_AFTER_S = 10.0
READ_S = 0.5
ABSENT_S = 1.0
# Lives that are over, remembered longer than any record of theirs can lie in Redis.
MAX_DEAD = 10_000


@dataclass(slots=True)
class Node:
    """A node as this router sees it. ``own_tokens`` and ``own_requests`` are what it has there itself, and with
    ``_reported`` what that was when the node last told its ``load``.

    ``refused_until_s`` is 0 if the last answer to a Reserve was a grant; ``probing`` while one request asks again.
    """

    record: NodeRecord
    load: NodeLoad
    heard_s: float
    answered: bool = False
    suspect: bool = False
    own_requests: int = 0
    own_tokens: int = 0
    own_requests_reported: int = 0
    own_tokens_reported: int = 0
    refused_until_s: float = 0.0
    probing: bool = False
    refused_peers: tuple[RefusedPeer, ...] = ()

    @property
    def party(self) -> Party:
        """Its control address and epoch."""
        return self.record.party

    @property
    def usable(self) -> bool:
        """True if requests may be sent to it."""
        return self.answered and not self.suspect


class NodeRegistry:
    """Owns the table of nodes; ``on_lost`` hears of each node that stops answering, ``on_dead`` of each
    that is given up, ``on_change`` of anything that may let a waiting request go on.
    """

    def __init__(
        self,
        membership: Membership,
        channel: Channel,
        on_lost: Callable[[Party], None],
        on_dead: Callable[[Party], None],
        on_change: Callable[[], None],
    ) -> None:
        self._membership = membership
        self._channel = channel
        self._on_lost = on_lost
        self._on_dead = on_dead
        self._on_change = on_change
        self._nodes: dict[str, Node] = {}
        self._dead: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._checked_s: float | None = None
        self._redis_is_away = False
        self._sequence = 0

    def nodes(self, role: Role) -> list[Node]:
        """Usable nodes of that role, in order of their names."""
        found = [n for n in self._nodes.values() if n.usable and n.record.role == role]
        return sorted(found, key=lambda node: node.record.party.id)

    def get(self, party: Party) -> Node | None:
        """That life of that node, usable or not."""
        node = self._nodes.get(party.id)
        return node if node is not None and node.party == party else None

    def all_nodes(self) -> list[Node]:
        """Every node known, for metrics."""
        return list(self._nodes.values())

    def is_one_joining(self, now: float) -> bool:
        """Whether a node has just appeared and may answer any moment."""
        return any(not node.answered and now - node.heard_s < SUSPECT_AFTER_S for node in self._nodes.values())

    async def run(self) -> None:
        """Follow Redis and ping the nodes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_redis())
            tasks.create_task(self._ping())

    def on_pong(self, sender: Party, pong: Pong, now: float) -> None:
        """A node answered."""
        node = self.get(sender)
        if node is None:
            return
        node.load = pong.load
        node.refused_peers = pong.refused_peers
        node.own_requests_reported, node.own_tokens_reported = node.own_requests, node.own_tokens
        node.heard_s = now
        if not node.usable:
            log.info("%s node %s answers", node.record.role, sender.id)
        node.answered, node.suspect = True, False
        self._on_change()

    def take_records(self, records: Iterable[NodeRecord], now: float) -> None:
        """Bring the table up to date with what Redis lists. A node that Redis forgot stays while it answers."""
        for record in records:
            party = record.party
            known = self._nodes.get(party.id)
            if known is not None and known.party.epoch == party.epoch:
                continue  # a life keeps the address and the facts it came with
            if (party.id, party.epoch) in self._dead:
                continue
            if known is not None:
                self._declare_dead(known, "another life took its place")
            self._nodes[party.id] = Node(record, NodeLoad(), heard_s=now)
            log.info("%s node %s joined", record.role, party.id)
            self._tell_of_misfits(record)

    def _tell_of_misfits(self, record: NodeRecord) -> None:
        """Once, when it joins: later only `/ready` says so, and only if no pair is left."""
        others = [node.record for node in self._nodes.values() if node.record.role != record.role]
        for reason in (why_apart(record, other) for other in others):
            if reason is not None:
                log.warning("%s", reason)

    def check_silence(self, now: float) -> None:
        """Suspect, then bury, the nodes that do not answer. Called after each ping."""
        self._forgive_own_absence(now)
        for node in list(self._nodes.values()):
            silent_s = now - node.heard_s
            if silent_s > DEAD_AFTER_S and not node.answered:
                # It never served anybody here, and others may well reach it: no reason to end its life.
                log.warning("%s node %s cannot be reached", node.record.role, node.party.id)
                del self._nodes[node.party.id]
                self._channel.forget(node.party)
            elif silent_s > DEAD_AFTER_S:
                self._declare_dead(node, f"silent for {silent_s:.1f} s")
            elif silent_s > SUSPECT_AFTER_S and node.answered and not node.suspect:
                node.suspect = True
                log.warning("%s node %s does not answer", node.record.role, node.party.id)
                self._on_lost(node.party)
                self._on_change()

    def _forgive_own_absence(self, now: float) -> None:
        """If this process did not run (stopped, swapped out), the silence of that time was its own."""
        late_s = 0.0 if self._checked_s is None else now - self._checked_s - PING_S
        self._checked_s = now
        if late_s > ABSENT_S:
            for node in self._nodes.values():
                node.heard_s = min(now, node.heard_s + late_s)

    async def _follow_redis(self) -> None:
        while True:
            try:
                records = await self._membership.read()
                self.take_records(records.values(), time.monotonic())
                if self._redis_is_away:
                    log.info("Redis is back")
                self._redis_is_away = False
            except MembershipError as error:
                if not self._redis_is_away:
                    log.warning("%s; going on with %d known nodes", error, len(self._nodes))
                self._redis_is_away = True
            await asyncio.sleep(READ_S * random.uniform(0.75, 1.25))

    async def _ping(self) -> None:
        while True:
            self._sequence += 1
            self._tell(Ping(self._sequence), [node.party for node in self._nodes.values()])
            await asyncio.sleep(PING_S)
            self.check_silence(time.monotonic())

    def _declare_dead(self, node: Node, why: str) -> None:
        party = node.party
        log.warning("%s node %s is dead: %s", node.record.role, party.id, why)
        del self._nodes[party.id]
        self._dead[(party.id, party.epoch)] = None
        if len(self._dead) > MAX_DEAD:
            self._dead.popitem(last=False)
        if not node.suspect:
            self._on_lost(party)
        self._on_dead(party)
        # The node itself is told too: if it lives after all, it has to come back as another life.
        self._tell(PeerDown(party.id, party.epoch), [party, *(other.party for other in self._nodes.values())])
        self._channel.forget(party)
        self._on_change()

    def _tell(self, message: Ping | PeerDown, parties: Iterable[Party]) -> None:
        for party in parties:
            try:
                self._channel.send(party, message)
            except ChannelError as error:
                log.debug("cannot reach %s: %s", party.id, error)  # its silence is what counts
