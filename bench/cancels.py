"""Requests cancelled at random moments, through real loops, channels and transports: ``python -m bench.cancels``.

Only the model is a fake. Every cancel is acknowledged by both nodes with the number of blocks it freed; afterwards no
block is held or orphaned, and no thread or file descriptor is left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Final

from bench.pair import FINGERPRINT, BenchNode, bench_pair
from cluster.channel import Channel
from cluster.prefix_hash import block_hashes, seed_hash
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import (
    Cancel,
    Cancelled,
    Failed,
    Granted,
    Message,
    Party,
    Ping,
    Refused,
    Reserve,
    Submit,
    Token0,
    Tokens,
)

SCHEMES: Final = ("tcp", "ucx", "ucx-mapped")
SETTLED_S: Final = 2.0
_SEED: Final = seed_hash(FINGERPRINT)
_DEADLINE_S: Final = 60.0
_MAX_TOKENS: Final = 64


@dataclass
class Result:
    """``settled_s`` is from the last acknowledgement until nothing is held. ``moments`` counts the states (on P, on D)
    in which requests were when they were cancelled; ``gone`` means over already, or not there yet."""

    scheme: str
    cancelled: int = 0
    acknowledged: int = 0
    blocks_freed: int = 0
    refused: int = 0
    seconds: float = 0.0
    settled_s: float = 0.0
    orphaned: int = 0
    held: int = 0
    new_threads: list[str] = field(default_factory=list)
    fds_grown: int = 0
    moments: dict[str, int] = field(default_factory=dict)


class _Router:
    """Asks, and cancels at a moment that chance picks."""

    def __init__(self, channel: Channel, prefill: BenchNode, decode: BenchNode, rng: random.Random) -> None:
        self._channel, self._prefill, self._decode, self._rng = channel, prefill, decode, rng
        self._inboxes: dict[RequestKey, asyncio.Queue[tuple[Party, Message]]] = {}
        self._numbers = count()
        self.moments: Counter[str] = Counter()
        self.refused = 0

    async def listen(self) -> None:
        while True:
            envelope = await self._channel.receive()
            body = envelope.body
            keys = [item.key for item in body.items] if isinstance(body, Tokens) else [getattr(body, "key", None)]
            for key in dict.fromkeys(keys):
                if key in self._inboxes:
                    self._inboxes[key].put_nowait((envelope.sender, body))

    async def ping(self) -> None:
        """As a router does: nodes end the requests of one that is silent."""
        for number in count():
            for node in (self._prefill, self._decode):
                self._channel.send(node.party, Ping(number))
            await asyncio.sleep(0.5)

    async def cancel_one(self, *, when_over: bool = False) -> int:
        """Start a request, cancel it somewhere; returns the blocks freed once both nodes have acknowledged."""
        key = RequestKey(RequestId(f"r{next(self._numbers)}"), 1)
        inbox = self._inboxes[key] = asyncio.Queue()
        running = asyncio.create_task(self._run(key, inbox))
        # From a fraction of a step to longer than most requests take: every window is met, the end and the start too.
        moment = self._rng.expovariate(1 / self._rng.choice([0.002, 0.01, 0.05, 0.2]))
        await asyncio.wait([running], timeout=_DEADLINE_S if when_over else moment)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self.moments[f"{_state(self._prefill, key)}, {_state(self._decode, key)}"] += 1
        parties = {self._prefill.party, self._decode.party}
        for party in parties:
            self._channel.send(party, Cancel(key))
        freed = 0
        async with asyncio.timeout(_DEADLINE_S):
            while parties:
                sender, body = await inbox.get()
                if isinstance(body, Cancelled) and sender in parties:
                    parties.remove(sender)
                    freed += body.blocks_freed
        del self._inboxes[key]
        return freed

    async def _run(self, key: RequestKey, inbox: asyncio.Queue[tuple[Party, Message]]) -> None:
        # Half of the prompts have been here before, perhaps.
        family, length = (
            self._rng.choice([self._rng.randrange(20), self._rng.randrange(1000)]),
            self._rng.randrange(1, 300),
        )
        prompt = tuple((family + i) % 1000 for i in range(length))
        sampling = SamplingParams(max_tokens=self._rng.randrange(1, _MAX_TOKENS))
        prefill, decode = self._prefill, self._decode
        names = block_hashes(_SEED, prompt, decode.block_size)
        self._channel.send(decode.party, Reserve(key, prefill.party, length, _SEED, names, sampling, _DEADLINE_S))
        while True:
            match (await inbox.get())[1]:
                case Granted(_key, ticket):
                    names = block_hashes(_SEED, prompt, prefill.block_size)
                    self._channel.send(prefill.party, Submit(key, prompt, names, sampling, ticket, _DEADLINE_S))
                case Refused():
                    self.refused += 1
                    return
                case Token0(choices=choices) if all(choice.finish_reason for choice in choices):
                    return
                case Failed():
                    return
                case Tokens(_step, items) if any(item.key == key and item.finish_reason for item in items):
                    return
                case _:
                    pass


async def cancel_many(
    scheme: str, num_requests: int, *, clients: int = 32, block_sizes: tuple[int, int] = (16, 16), seed: int = 0
) -> Result:
    """Cancel ``num_requests``, ``clients`` at a time, and look at what is left."""
    result = Result(scheme)
    async with bench_pair(scheme, block_sizes) as (channel, prefill, decode):
        router = _Router(channel, prefill, decode, random.Random(seed))
        helpers = [asyncio.create_task(router.listen()), asyncio.create_task(router.ping())]
        # Connections and threads are there from here on: whole requests have been through both forward threads.
        for _ in range(4):
            await router.cancel_one(when_over=True)
        for _ in range(4 * clients):
            await router.cancel_one()
        router.moments.clear()
        gc.collect()  # descriptors of what ran in this process before are not ours
        threads, fds = _threads(), _num_fds()
        todo, began = iter(range(num_requests)), time.perf_counter()

        async def client() -> None:
            for _ in todo:
                freed = await router.cancel_one()
                result.blocks_freed += freed
                result.acknowledged += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        result.seconds = time.perf_counter() - began
        result.settled_s = await _settle((prefill, decode))
        result.cancelled, result.refused = num_requests, router.refused
        result.orphaned = sum(len(node.state.check()) for node in (prefill, decode))
        result.held = sum(_held(node) for node in (prefill, decode))
        result.new_threads = sorted(thread.name for thread in _threads() - threads)
        result.fds_grown = _num_fds() - fds
        result.moments = dict(router.moments.most_common())
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
    return result


async def _settle(nodes: tuple[BenchNode, BenchNode]) -> float:
    began = time.perf_counter()
    while any(_held(node) for node in nodes) and time.perf_counter() - began < SETTLED_S:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.01)
    return time.perf_counter() - began


def _threads() -> set[threading.Thread]:
    """Without those of asyncio's own executor, which makes another (up to a bound) whenever all are busy."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


def _held(node: BenchNode) -> int:
    """Requests, blocks and transfers that are not given back."""
    stats, pool = node.plane.stats(), node.pool
    return len(node.state.report()) + pool.num_blocks - pool.num_free + stats.open_tickets + stats.open_pushes


def _state(node: BenchNode, key: RequestKey) -> str:
    name = str(key)
    return next((str(row["state"]) for row in node.state.report() if row["key"] == name), "gone")


def _num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    """Run it over each transport."""
    parser = argparse.ArgumentParser(prog="python -m bench.cancels", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--transport", choices=SCHEMES, action="append", help="may be repeated (default: all)")
    parser.add_argument("--block-sizes", type=int, nargs=2, default=(16, 16), metavar=("P", "D"), help="tokens")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = (options.block_sizes[0], options.block_sizes[1])
    for scheme in options.transport or SCHEMES:
        result = asyncio.run(cancel_many(scheme, options.requests, block_sizes=sizes))
        if options.json:
            print(json.dumps(asdict(result)))
            continue
        print(f"{scheme}: {result.acknowledged} of {result.cancelled} cancels acknowledged in {result.seconds:.1f} s,")
        print(f"  {result.blocks_freed} blocks freed, {result.refused} requests refused for lack of room")
        print(f"  nothing held after {result.settled_s:.2f} s: {result.held} held, {result.orphaned} orphaned,")
        print(f"  {len(result.new_threads)} more threads, {result.fds_grown} more fds; cancelled while (on P, on D):")
        for moment, times in result.moments.items():
            print(f"  {times:7} {moment}")


if __name__ == "__main__":
    main()
