"""The whole simulation: nodes, routers and the channels between them. Nothing happens unless somebody asks for it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from math import isfinite
from types import MappingProxyType

from fake_kv import POISON, FakePlane, Wire
from fake_node import BLOCK_SIZE, Node
from fake_router import Router

from cluster.wire import Cancel, Message, Party, PeerDown, Ping, Submit
from decode_node.intake import IntakeState
from decode_node.scheduler import DecodeState
from engine.audit import Held
from kvtransfer.ticket import PeerId

Move = Callable[[], None]


class World:
    """``lives`` holds every life of every node there ever was; ``nodes`` the present ones by name.

    ``block_sizes`` are the nodes' by name, where it is not the usual one.
    """

    def __init__(
        self,
        num_prefill: int = 2,
        num_decode: int = 2,
        num_routers: int = 2,
        block_sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.now = 1000.0
        self.channels: dict[tuple[Party, Party], deque[Message]] = {}
        self.nodes: dict[str, Node] = {}
        self.lives: list[Node] = []
        self._epochs = count(1)
        self._ticket_ids = count(1)
        self.block_sizes = block_sizes
        self.routers = [Router(self._party(f"R{i}"), self.post, self._block_size_of) for i in range(num_routers)]
        for name in [f"P{i}" for i in range(num_prefill)] + [f"D{i}" for i in range(num_decode)]:
            self.start_node(name)

    # --- who is there ---

    def start_node(self, name: str) -> None:
        role = "prefill" if name.startswith("P") else "decode"
        party = self._party(name)
        size = self._block_size_of(party)
        node = Node(party, role, self.post, lambda: self.now, lambda: next(self._ticket_ids), size)
        node.plane.peers = self._plane_of
        self.nodes[name] = node
        self.lives.append(node)

    def kill(self, name: str) -> None:
        """Its process is gone, and with it every message from and to it. Its peers do not know yet."""
        node = self.nodes.pop(name)
        node.plane.alive = False
        for wire in node.plane.wires.values():
            wire.flying.clear()
        for pair in [pair for pair in self.channels if node.party in pair]:
            del self.channels[pair]

    def parties(self, letter: str = "") -> list[Party]:
        return [node.party for name, node in self.nodes.items() if name.startswith(letter)]

    def wires(self) -> list[Wire]:
        return [wire for node in self.nodes.values() for wire in node.plane.wires.values()]

    def post(self, sender: Party, receiver: Party, message: Message) -> None:
        queue = self.channels.setdefault((sender, receiver), deque())
        if not (isinstance(message, Ping) and Ping(0) in queue):
            queue.append(message)

    def losable(self) -> list[tuple[Party, Party]]:
        """Channels whose next message may get lost: between nodes, and from a router what a node can do without.

        The loss of anything else is noticed by the router's timers, which are not simulated here.
        """
        nodes = set(self.parties())
        return [
            pair
            for pair, queue in self.channels.items()
            if queue and (nodes.issuperset(pair) or isinstance(queue[0], Submit | Cancel | PeerDown))
        ]

    # --- what can happen ---

    def moves(self) -> list[Move]:
        """Everything that is under way, one choice each."""
        moves: list[Move] = [lambda pair=pair: self._deliver(pair) for pair, queue in self.channels.items() if queue]
        for node in self.nodes.values():
            if node.has_news():
                moves.append(node.read_news)
            if node.plan is not None:
                moves.append(node.finish_step)
            elif not node.idle:
                moves.append(node.start_step)
        for wire in self.wires():
            moves.extend(wire.moves())
        return moves

    def run(self, rng: random.Random, num_moves: int) -> None:
        """Let things happen in random order."""
        for _ in range(num_moves):
            if not (moves := self.moves()):
                return
            rng.choice(moves)()

    def settle(self, rng: random.Random, limit: int = 20_000) -> None:
        """Let things happen until nothing is under way."""
        self.run(rng, limit)
        assert not self.moves(), f"still not at rest: {self.report()}"

    def advance(self, seconds: float, silent: Router | None = None) -> None:
        """Time passes on every node, and their clocks tick."""
        self.now += seconds
        for router in self.routers:
            if router is not silent:
                router.ping(self.parties())
        for node in self.nodes.values():
            node.tick()

    def declare_dead(self, router: Router, party: Party) -> None:
        router.declare_dead(party, self.parties())

    # --- what must always hold ---

    def check(self) -> None:
        """Raises AssertionError or :class:`BlockPoolError` if any rule of ownership is broken."""
        for node in self.nodes.values():
            node.pool.check_integrity()
            assert node.state.check() == (), "blocks of nobody"
            assert all(isfinite(float(row["deadline_s"])) for row in node.state.report()), "blocks without a deadline"
            owned = {report.block_id for report in node.pool.report() if report.state == "owned"}
            assert owned.issuperset(node.plane.being_read()), "the transport reads a block that was given back"
            if isinstance(node.state, DecodeState):
                self._check_decode(node, node.state)
            else:
                self._check_owners(node, {h.owner: Held(h.block_table) for h in node.state._table})

    def poison(self) -> None:
        """Overwrite every block that holds nothing of use: free ones no lookup can find, and those in quarantine."""
        for node in self.nodes.values():
            for block_id, block in enumerate(node.pool._blocks):
                if not block.owners and block.name is None:
                    node.memory.blocks[block_id][:] = [POISON] * node.memory.block_size

    def _check_decode(self, node: Node, state: DecodeState) -> None:
        intakes = list(state._table)
        self._check_owners(node, {owner: held for i in intakes for owner, held in i.holdings().items()})
        promised = state._table.promised
        growths = [each.growth_left for intake in intakes for each in (intake, *intake.branches)]
        assert promised == sum(growths)
        assert 0 <= promised <= node.pool.num_free
        assert all(growth >= 0 for growth in growths)
        for intake in intakes:
            assert not (intake.branches and (intake.block_table or intake.choices)), "forked, and yet of one piece"
            assert all(branch.generating or branch.in_step for branch in intake.branches)
            assert not intake.active or intake.num_live or intake.in_step, "nobody waits for this request"
            if intake.state in (IntakeState.RUNNABLE, IntakeState.RUNNING):
                assert intake.covered
                assert intake.capsule is not None
        for block_id in node.plane.receives._blocks_in_use:
            owners = [i for i in intakes if block_id in i.block_table[-i.num_missing :] or block_id in i.quarantined]
            assert len(owners) == 1, f"block {block_id} can be written for a ticket of nobody"
            assert owners[0].quarantined or node.pool.is_writable(block_id, owners[0].owner)

    def _check_owners(self, node: Node, claimed: dict[str, Held]) -> None:
        held: dict[str, tuple[list[int], list[int]]] = {owner: ([], []) for owner in claimed}
        for report in node.pool.report():
            for owner in report.owners:
                assert owner in held, f"{owner} is gone but holds block {report.block_id} of {node.party.id}"
                held[owner][report.state == "quarantined"].append(report.block_id)
        for owner, claim in claimed.items():
            assert (sorted(claim.owned), sorted(claim.quarantined)) == held[owner]

    # --- the end ---

    def drain(self, rng: random.Random) -> None:
        """Bury the dead, let all deadlines pass, and see that nothing is left and everybody was answered."""
        for router in self.routers:
            for life in self.lives:
                if life.party.id not in self.nodes or self.nodes[life.party.id] is not life:
                    self.declare_dead(router, life.party)
        self.settle(rng)
        for _ in range(40):
            self.advance(2.0)
            self.settle(rng)
        for router in self.routers:
            router.repeat_cancels()
        self.settle(rng)
        self.check()
        for node in self.nodes.values():
            assert not node.state.report(), node.state.report()
            assert node.pool.num_free == node.pool.num_blocks
            assert node.plane.sends.open_pushes == 0
            assert node.plane.receives.open_tickets == 0
        for router in self.routers:
            assert not router.open_jobs(), f"never answered: {router.open_jobs()}"
            assert not any(job.unconfirmed for job in router.jobs.values())

    def report(self) -> dict[str, object]:
        return {name: node.state.report() for name, node in self.nodes.items()}

    def _deliver(self, pair: tuple[Party, Party]) -> None:
        sender, receiver = pair
        message = self.channels[pair].popleft()
        for router in self.routers:
            if router.party == receiver:
                router.receive(sender, message)
        node = self.nodes.get(receiver.id)
        if node is not None and node.party == receiver:
            node.receive(sender, message)

    def _block_size_of(self, party: Party) -> int:
        return self.block_sizes.get(party.id, BLOCK_SIZE)

    def _plane_of(self, peer: PeerId) -> FakePlane | None:
        return next((life.plane for life in self.lives if life.plane.me == peer), None)

    def _party(self, name: str) -> Party:
        return Party(name, next(self._epochs), f"tcp://{name}")
