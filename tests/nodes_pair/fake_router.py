"""The router of the simulation: reserve, submit, relay, cancel until confirmed, as `router/dispatch.py` does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fake_kv import FINGERPRINT
from fake_node import BLOCK_SIZE, expected_answer, logprobs_of

from cluster.prefix_hash import block_hashes, seed_hash
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import (
    Cancel,
    CancelChoice,
    Cancelled,
    Failed,
    Granted,
    Message,
    Party,
    PeerDown,
    Ping,
    Pong,
    Refused,
    Reserve,
    Submit,
    Token0,
    TokenItem,
    Tokens,
)

SEED = seed_hash(FINGERPRINT)


@dataclass
class Job:
    """One dispatch as its client sees it. ``ending`` is written once.

    ``answers`` are the tokens of each choice, ``waiting`` the choices that have not ended, ``dropped`` those that the
    router ended itself.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    sampling: SamplingParams
    prefill: Party
    decode: Party
    deadline_s: float
    granted: Granted | None = None
    cached_tokens: int = 0
    answers: dict[int, list[int]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    begun: bool = False
    early: list[TokenItem] = field(default_factory=list)
    ending: str | None = None
    unconfirmed: set[Party] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.answers = {each.choice: [] for each in self.sampling.choices()}
        self.waiting = set(self.answers)

    @property
    def token_ids(self) -> list[int]:
        """The first choice's."""
        return self.answers[self.sampling.choice]

    @property
    def decoding(self) -> bool:
        """True once the decode node has spoken for it."""
        return any(len(token_ids) > 1 for token_ids in self.answers.values())

    def names(self, block_size: int = BLOCK_SIZE) -> tuple[bytes, ...]:
        return block_hashes(SEED, self.prompt, block_size)


class Router:
    """Trusts nobody: every token is compared with the only right answer the moment it comes."""

    def __init__(
        self,
        party: Party,
        post: Callable[[Party, Party, Message], None],
        block_size_of: Callable[[Party], int] = lambda _party: BLOCK_SIZE,
    ) -> None:
        self.party = party
        self.jobs: dict[RequestKey, Job] = {}
        self.dead: set[tuple[str, int]] = set()
        self._post = post
        self._block_size_of = block_size_of

    def open_jobs(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.ending is None]

    def start(
        self, prompt: tuple[int, ...], sampling: SamplingParams, pair: tuple[Party, Party], deadline_s: float
    ) -> Job:
        key = RequestKey(RequestId(f"{self.party.id}-{len(self.jobs)}"), 1)
        prefill, decode = pair
        job = self.jobs[key] = Job(key, prompt, sampling, prefill, decode, deadline_s)
        reserve = Reserve(
            key=key,
            prefill=prefill,
            prompt_len=len(prompt),
            seed_hash=SEED,
            block_hashes=job.names(self._block_size_of(decode)),
            sampling=sampling,
            deadline_s=deadline_s,
        )
        self._post(self.party, decode, reserve)
        return job

    def cancel(self, job: Job) -> None:
        self._end(job, "cancelled", cancel=True)

    def drop(self, job: Job, choice: int) -> None:
        """One choice has met its stop string; the last one ends the request."""
        job.waiting.remove(choice)
        job.dropped.add(choice)
        if job.waiting:
            self._post(self.party, job.decode, CancelChoice(job.key, choice))
        else:
            self._end(job, "finished", cancel=True)

    def repeat_cancels(self) -> None:
        for job in self.jobs.values():
            for party in job.unconfirmed:
                self._post(self.party, party, Cancel(job.key))

    def ping(self, parties: list[Party]) -> None:
        for party in parties:
            self._post(self.party, party, Ping(0))

    def declare_dead(self, lost: Party, parties: list[Party]) -> None:
        """As `router/registry.py`: everybody is told, the dead one too, and its dispatches are given up."""
        self.dead.add((lost.id, lost.epoch))
        for party in dict.fromkeys([lost, *parties]):
            self._post(self.party, party, PeerDown(lost.id, lost.epoch))
        for job in self.jobs.values():
            done = job.prefill == lost and job.decoding
            if job.ending is None and lost in (job.prefill, job.decode) and not done:
                self._end(job, "failed: node lost", cancel=True)
            job.unconfirmed.discard(lost)

    def receive(self, sender: Party, message: Message) -> None:
        match message:
            case Pong():
                return
            case Tokens(_step, items):
                for item in items:
                    self._relay(self.jobs[item.key], item)
                return
        assert isinstance(message, Granted | Refused | Token0 | Failed | Cancelled), message
        job = self.jobs[message.key]
        match message:
            case Cancelled():
                job.unconfirmed.discard(sender)
            case Granted() if job.ending is None:
                self._submit(job, message)
            case Refused(_key, reason, _retry) if job.ending is None:
                self._end(job, f"refused: {reason}", cancel=False)
            case Failed(_key, code) if job.ending is None:
                self._end(job, f"failed: {code}", cancel=True)
            case Failed():
                # A decode node need not know yet that the request ended at token 0, or that nobody reads it any more.
                unaware = not job.decoding or bool(job.dropped)
                lost = (job.decode.id, job.decode.epoch) in self.dead
                assert job.ending != "finished" or lost or unaware, f"{message} after a complete answer"
            case Token0():
                self._first(job, message)

    def _submit(self, job: Job, granted: Granted) -> None:
        assert job.granted is None
        job.granted = granted
        submit = Submit(
            key=job.key,
            prompt_token_ids=job.prompt,
            block_hashes=job.names(self._block_size_of(job.prefill)),
            sampling=job.sampling,
            ticket=granted.ticket,
            deadline_s=job.deadline_s,
        )
        self._post(self.party, job.prefill, submit)

    def _first(self, job: Job, token0: Token0) -> None:
        if job.ending is not None:
            return
        assert not job.begun, "a second token 0"
        assert [first.choice for first in token0.choices] == list(job.answers)
        job.begun = True
        job.cached_tokens = token0.cached_tokens
        for first in token0.choices:
            logprobs = () if first.logprobs is None else (first.logprobs,)
            item = TokenItem(job.key, 0, (first.token_id,), first.finish_reason, logprobs, first.choice)
            self._relay(job, item)
        early, job.early = job.early, []
        for item in early:
            self._relay(job, item)

    def _relay(self, job: Job, item: TokenItem) -> None:
        if job.ending is not None or item.choice in job.dropped:
            return
        if not job.begun:
            job.early.append(item)
            return
        assert item.choice in job.waiting, f"{item} after the end of its choice"
        token_ids = job.answers[item.choice]
        assert item.index == len(token_ids), f"gap: {item} after {len(token_ids)} tokens"
        token_ids += item.token_ids
        wanted = [logprobs_of(job.sampling, token_id) for token_id in item.token_ids]
        assert list(item.logprobs) == [each for each in wanted if each is not None]
        alone = next(each for each in job.sampling.choices() if each.choice == item.choice)
        answer, reason = expected_answer(job.prompt, alone)
        assert token_ids == answer[: len(token_ids)], f"{job.key}/{item.choice}: {token_ids}, right is {answer}"
        if item.finish_reason is not None:
            assert (token_ids, item.finish_reason) == (answer, reason)
            job.waiting.remove(item.choice)
            if not job.waiting:
                self._end(job, "finished", cancel=bool(job.dropped))

    def _end(self, job: Job, ending: str, *, cancel: bool) -> None:
        job.ending = ending
        if cancel:
            job.unconfirmed = {party for party in (job.prefill, job.decode) if (party.id, party.epoch) not in self.dead}
            for party in job.unconfirmed:
                self._post(self.party, party, Cancel(job.key))
