"""A real prefill node sends a real decode node prompts in chunks: what of the transfer hides behind compute."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Final

from bench.transfer_node import BLOCK_SIZE, FINGERPRINT, Node, Notes
from cluster.channel import Channel
from cluster.config import ClusterConfig, new_epoch
from cluster.prefix_hash import block_hashes, seed_hash
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import Cancel, Cancelled, Failed, Granted, Message, Ping, Pong, Reserve, Submit, Token0, Tokens

ROWS: Final = ("overlap_tcp_1024", "token0_delay", "decode_start_after_last_chunk_ms")
PROMPT_LEN: Final = 1024
SCHEME: Final = "tcp"
REQUEST_TIMEOUT_S: Final = 60.0
PING_S: Final = 0.25
# What a decode node may take on top of the last chunk's transfer.
START_GRACE_MS: Final = 5.0
_SEED: Final = seed_hash(FINGERPRINT)

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sent:
    """One request whose blocks were sent, in seconds."""

    ttft: float
    hidden: float
    transfer: float
    last_chunk: float
    decode_start: float


def measure_nodes(cpus: Sequence[int], model: str, runs: int) -> Iterator[tuple[str, float, str, float]]:
    """Rows as (name, value, unit, limit). A request that sends and one that does not take turns."""
    from cluster.model_store import resolve_model

    directory = str(resolve_model(model).directory)
    with _nodes(cpus, directory) as (prefill, decode):
        sent, silent_ttfts = asyncio.run(_requests(prefill, decode, runs))
    yield "overlap_tcp_1024", statistics.median(one.hidden / one.transfer for one in sent), "", 1.0
    ttft = statistics.median(one.ttft for one in sent)
    yield "token0_delay", ttft * 1e3, "ms", statistics.median(silent_ttfts) * 1e3
    last_ms = statistics.median(one.last_chunk for one in sent) * 1e3
    start_ms = statistics.median(one.decode_start for one in sent) * 1e3
    yield "decode_start_after_last_chunk_ms", start_ms, "ms", last_ms + START_GRACE_MS


def hidden_seconds(prefill: Notes, arrivals: dict[int, float]) -> tuple[float, float]:
    """Seconds in which blocks were on their way before the prompt's last step had ended, and seconds in all.

    On their way: from the moment blocks were handed to the plane until the other node heard of the last of them. What
    comes after the last step is what a request waits for; that sending slows the steps down is `token0_delay`.
    """
    flights = [(pushed, max(arrivals[index] for index in indexes)) for pushed, indexes in prefill.pushes if indexes]
    computed = max(end for _, end in prefill.steps)
    under_way = _union(flights)
    hidden = sum(max(0.0, min(end, computed) - begin) for begin, end in under_way)
    return hidden, sum(end - begin for begin, end in under_way)


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


@contextmanager
def _nodes(cpus: Sequence[int], directory: str) -> Iterator[tuple[Node, Node]]:
    """The prefill node on the first core, decode node and router on the last."""
    prefill = Node("prefill", cpus[0], directory, SCHEME)
    try:
        decode = Node("decode", cpus[-1], directory, SCHEME)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpus[-1]})
        try:
            yield prefill, decode
        finally:
            os.sched_setaffinity(0, before)
            decode.stop()
    finally:
        prefill.stop()


async def _requests(prefill: Node, decode: Node, runs: int) -> tuple[list[Sent], list[float]]:
    config = ClusterConfig("router-bench", new_epoch(), "", "127.0.0.1", "127.0.0.1", None)
    async with Channel(config) as channel:
        router = _Router(channel, prefill, decode)
        pinging = asyncio.create_task(router.ping())
        await router.sent(0)  # connects, and touches what is touched once
        sent, silent = [], []
        for number in range(runs):
            silent.append(await router.silent(number))
            sent.append(await router.sent(number + 1))
        pinging.cancel()
    return sent, silent


class _Router:
    """Plays the router for one request at a time."""

    def __init__(self, channel: Channel, prefill: Node, decode: Node) -> None:
        self._channel = channel
        self._prefill, self._decode = prefill, decode
        self._number = 0

    async def ping(self) -> None:
        """Nodes end what a silent router asked for."""
        for sequence in count():
            for node in (self._prefill, self._decode):
                self._channel.send(node.party, Ping(sequence))
            await asyncio.sleep(PING_S)

    async def sent(self, seed: int) -> Sent:
        """A request as any other; its second token comes from the decode node."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            _key, ttft = await self._to_token0(seed)
            while not isinstance(await self._hear(), Tokens):
                pass
        prefill, decode = self._prefill.take_notes(), self._decode.take_notes()
        hidden, transfer = hidden_seconds(prefill, decode.arrivals)
        pushed, indexes = [push for push in prefill.pushes if push[1]][-1]
        return Sent(
            ttft,
            hidden,
            transfer,
            last_chunk=max(decode.arrivals[index] for index in indexes) - pushed,
            decode_start=decode.steps[0][0] - prefill.steps[-1][1],
        )

    async def silent(self, seed: int) -> float:
        """Seconds to the first token of a node that sends no block; then the request is cancelled."""
        self._prefill.set_silent(True)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            key, ttft = await self._to_token0(seed)
            for node in (self._prefill, self._decode):
                self._channel.send(node.party, Cancel(key))
            answered = 0
            while answered < 2:
                answered += isinstance((await self._channel.receive()).body, Cancelled)
        self._prefill.set_silent(False)
        self._prefill.take_notes(), self._decode.take_notes()
        return ttft

    async def _to_token0(self, seed: int) -> tuple[RequestKey, float]:
        self._number += 1
        key = RequestKey(RequestId(f"bench-{self._number}"), 1)
        # Random, so that no prefix is found; the same with and without sending would find its own.
        prompt = tuple(random.Random(f"{self._number}-{seed}").choices(range(3, 40_000), k=PROMPT_LEN))
        names = block_hashes(_SEED, prompt, BLOCK_SIZE)
        sampling = SamplingParams(max_tokens=2)
        prefill, decode = self._prefill.party, self._decode.party
        send = self._channel.send
        send(decode, Reserve(key, prefill, PROMPT_LEN, _SEED, names, sampling, REQUEST_TIMEOUT_S))
        granted = await self._hear()
        if not isinstance(granted, Granted):
            raise RuntimeError(f"the decode node says {granted}")
        began = perf_counter()
        send(prefill, Submit(key, prompt, names, sampling, granted.ticket, REQUEST_TIMEOUT_S))
        while not isinstance(await self._hear(), Token0):
            pass
        return key, perf_counter() - began

    async def _hear(self) -> Message:
        while isinstance(body := (await self._channel.receive()).body, Pong):
            pass
        if isinstance(body, Failed):
            raise RuntimeError(f"a request failed: {body.message}")
        return body
