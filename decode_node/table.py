"""The decode node's requests and their blocks: the one place where blocks change hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cluster.request import RequestKey
from cluster.transitions import Life
from cluster.wire import Capsule, Party, Reserve
from decode_node.branch import Branch, BranchState
from decode_node.intake import DECODING, INTAKE, Intake
from decode_node.reservation import DecodeSettings, NoRoom, Room, find_room, growth_blocks, stored_len
from engine.audit import find_orphans
from engine.block_pool import BlockPool, BlockReport
from engine.remembered import Tombstones
from engine.step import BlockCopy
from kvtransfer.ticket import BlockHandle


class IntakeTable:
    """Owns the block pool's bookkeeping. ``promised`` blocks are free but already belong to somebody's growth."""

    def __init__(self, pool: BlockPool, settings: DecodeSettings, new_ticket_id: Callable[[], int]) -> None:
        self.pool = pool
        self._settings = settings
        self._new_ticket_id = new_ticket_id
        self._intakes: dict[RequestKey, Intake] = {}
        self._by_ticket: dict[int, Intake] = {}
        self._ended = Tombstones()
        self.promised = 0

    def __iter__(self) -> Iterator[Intake]:
        """In order of arrival; a copy, so that entries may end on the way."""
        return iter(list(self._intakes.values()))

    def __len__(self) -> int:
        return len(self._intakes)

    def get(self, key: RequestKey) -> Intake | None:
        """The live request of that name."""
        return self._intakes.get(key)

    def of_ticket(self, ticket_id: int) -> Intake | None:
        """The request whose transfer this is."""
        return self._by_ticket.get(ticket_id)

    def decoding(self) -> list[Intake]:
        """The running batch, in order of arrival."""
        return [intake for intake in self._intakes.values() if intake.state in DECODING]

    def has_ended(self, key: RequestKey) -> bool:
        """True if this dispatch was here, or was cancelled before it came."""
        return key in self._ended

    def bury(self, key: RequestKey) -> None:
        """Never start this dispatch."""
        self._ended.add(key)

    def admit(self, router: Party, reserve: Reserve, now: float) -> Intake | NoRoom:
        """Share, reserve and promise the blocks ``reserve`` needs, or say why not."""
        num_held = sum(max(1, intake.num_live) for intake in self._intakes.values())
        room = find_room(reserve, self._settings, self.pool, num_held=num_held, num_promised=self.promised)
        if isinstance(room, NoRoom):
            return room
        return self._take(router, reserve, room, now)

    def handles(self, intake: Intake) -> tuple[BlockHandle, ...]:
        """The blocks that have to be sent, in prompt order, each in its current generation."""
        missing = intake.block_table[len(intake.block_table) - intake.num_missing :]
        return tuple(BlockHandle(block_id, self.pool.generation(block_id)) for block_id in missing)

    def arrived(self, intake: Intake) -> None:
        """Everything is here: the prompt's full blocks can be found by others, the ticket is closed."""
        self._by_ticket.pop(intake.ticket_id, None)
        # Only what came with this ticket: a shared block that lost its name since has lost it for a reason.
        for index in range(len(intake.block_table) - intake.num_missing, len(intake.block_names)):
            self.pool.name(intake.block_table[index], intake.block_names[index])

    def distrust(self, intake: Intake) -> None:
        """The engine could not go on from these blocks: a retry must get them anew, not find them."""
        for branch in intake.branches:
            self.pool.forget_names(branch.block_table)

    def start(self, intake: Intake, capsule: Capsule) -> None:
        """Token 0 is known: what was promised to choices that it ended is free."""
        intake.start(capsule)
        self._narrow(intake)

    def fork(self, intake: Intake, now: float) -> list[BlockCopy]:
        """Every choice goes on by itself, from the next step on; the copies are to be made in that step.

        The prompt's full blocks are shared. Its partial last block is about to be written: the last choice has it,
        each other one a copy.
        """
        num_full = intake.prompt_len // self._settings.block_size
        full, partial = intake.block_table[:num_full], intake.block_table[num_full:]
        num_copied = (len(intake.choices) - 1) * len(partial)
        branches = intake.branch_out((intake.growth_left - num_copied) // len(intake.choices), now)
        self.promised -= num_copied
        copies: list[BlockCopy] = []
        for branch in branches[:-1]:
            own = self.pool.allocate(len(partial), branch.owner)
            copies += map(BlockCopy, partial, own)
            branch.block_table = full + own
        branches[-1].block_table = full + partial
        if branches[-1].owner != intake.owner:
            self.pool.fork(full, intake.owner, [branch.owner for branch in branches])
            self.pool.fork(partial, intake.owner, [branches[-1].owner])
        intake.block_table, intake.growth_left = [], 0
        return copies

    def grow(self, branch: Branch) -> None:
        """Take a promised block if the next token needs one."""
        if branch.context_len == len(branch.block_table) * self._settings.block_size:
            branch.block_table += self.pool.allocate(1, branch.owner)
            branch.growth_left -= 1
            self.promised -= 1

    def drop(self, intake: Intake, choice: int, now: float) -> None:
        """This choice is not wanted any more: give back what only it holds, at once or when its step has ended."""
        if choice in intake.choices:
            intake.choices.remove(choice)
            self._narrow(intake)
        for branch in list(intake.branches):
            if branch.choice == choice and branch.generating:
                branch.life.move(BranchState.DROPPED, now)
                if not branch.in_step:
                    self.release(intake, branch, now)

    def release(self, intake: Intake, branch: Branch, now: float) -> None:
        """This branch has ended and no step writes its blocks: give them back. Those it shares stay the others'."""
        intake.num_freed += self.pool.release(branch.block_table, branch.owner)
        self.promised -= branch.growth_left
        intake.branches.remove(branch)
        branch.life.move(BranchState.GONE, now)

    def quarantine(self, intake: Intake) -> None:
        """Bytes may still land in the missing blocks: nobody may have them yet."""
        first = len(intake.block_table) - intake.num_missing
        intake.quarantined = intake.block_table[first:]
        del intake.block_table[first:]
        self.pool.quarantine(intake.quarantined, intake.owner)

    def free(self, intake: Intake, now: float) -> int:
        """Give everything back and forget the request. Returns the number of blocks it has freed in all."""
        for branch in list(intake.branches):
            if branch.generating:
                branch.life.move(BranchState.DROPPED, now)
            self.release(intake, branch, now)
        freed = intake.num_freed + self.pool.release(intake.block_table, intake.owner)
        if intake.quarantined:
            freed += self.pool.end_quarantine(intake.quarantined, intake.owner)
        self.promised -= intake.growth_left
        self._by_ticket.pop(intake.ticket_id, None)
        del self._intakes[intake.key]
        self._ended.add(intake.key)
        return freed

    def orphans(self) -> tuple[BlockReport, ...]:
        """Blocks whose owner is not here or does not know of them."""
        held = {owner: each for intake in self._intakes.values() for owner, each in intake.holdings().items()}
        return find_orphans(self.pool.report(), held)

    def _narrow(self, intake: Intake) -> None:
        """Promise an intake that has not forked no more than its remaining choices may take."""
        total_len = stored_len(intake.prompt_len, intake.sampling, intake.num_emitted)
        growth = growth_blocks(intake.prompt_len, total_len, len(intake.choices), self._settings.block_size)
        self.promised -= intake.growth_left - growth
        intake.growth_left = growth

    def _take(self, router: Party, reserve: Reserve, room: Room, now: float) -> Intake:
        owner = str(reserve.key)
        self.pool.share(room.shared, owner)
        intake = Intake(
            key=reserve.key,
            router=router,
            prefill=reserve.prefill,
            prompt_len=reserve.prompt_len,
            seed_name=reserve.seed_hash,
            block_names=reserve.block_hashes,
            sampling=reserve.sampling,
            num_emitted=reserve.num_emitted,
            ticket_id=self._unused_ticket_id() if room.num_missing else 0,
            num_missing=room.num_missing,
            block_table=[*room.shared, *self.pool.allocate(room.num_missing, owner)],
            growth_left=room.growth,
            deadline_s=now + reserve.deadline_s,
            life=Life(INTAKE, now),
            choices=[sampling.choice for sampling in reserve.sampling.choices()],
        )
        self.promised += room.growth
        self._intakes[reserve.key] = intake
        if room.num_missing:
            self._by_ticket[intake.ticket_id] = intake
        return intake

    def _unused_ticket_id(self) -> int:
        while (ticket_id := self._new_ticket_id()) in self._by_ticket:
            pass
        return ticket_id
