"""A prefill or decode node in a process of its own, as a deployment has it but for Redis, that notes what happens when.

Its loop, state, block pool, runner, KV plane and control channel are the real ones. Times are `perf_counter`, one clock
for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final, cast

from cluster.config import ClusterConfig, new_epoch
from cluster.wire import Party

BLOCK_SIZE: Final = 16
CHUNK_TOKENS: Final = 256
NUM_TOKENS: Final = 6 * 1024
FINGERPRINT: Final = "benchmark"
START_TIMEOUT_S: Final = 120.0
ANSWER_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Notes:
    """What one node did, by its clock: steps as (begin, end); pushes as (time, indexes in the ticket); arrivals by
    index.
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    pushes: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    arrivals: dict[int, float] = field(default_factory=dict)


class Node:
    """The process, seen from the benchmark."""

    def __init__(self, role: str, cpu: int, directory: str, scheme: str) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, role, cpu, directory, scheme), daemon=True)
        self._process.start()
        theirs.close()
        self.party: Party = self._receive(START_TIMEOUT_S)

    def take_notes(self) -> Notes:
        """What happened since the last call."""
        return cast(Notes, self._call("notes"))

    def set_silent(self, silent: bool) -> None:
        """A silent node computes and says all as ever, but hands no block to its plane."""
        self._call("silent" if silent else "sending")

    def stop(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send("stop")
        self._process.join(ANSWER_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, what: str) -> object:
        self._pipe.send(what)
        return self._receive(ANSWER_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError("a node of the benchmark does not answer")
        return self._pipe.recv()


class _Watched:
    """The plane or the runner of a node, with an eye on the calls that matter."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.notes = Notes()
        self.silent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, plan: Any) -> Any:
        began = time.perf_counter()
        result = self._real.execute(plan)
        self.notes.steps.append((began, time.perf_counter()))
        return result

    def push(self, ticket: Any, items: Sequence[tuple[int, int]]) -> None:
        self.notes.pushes.append((time.perf_counter(), tuple(index for index, _ in items)))
        if not self.silent:
            self._real.push(ticket, items)

    def poll(self) -> list[Any]:
        from kvtransfer.events import BlocksArrived

        events: list[Any] = self._real.poll()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, BlocksArrived):
                self.notes.arrivals.update(dict.fromkeys(event.indexes, now))
        return events


def _main(pipe: Connection, role: str, cpu: int, directory: str, scheme: str) -> None:
    os.sched_setaffinity(0, {cpu})
    os.environ["OMP_NUM_THREADS"] = "1"
    asyncio.run(_serve(pipe, role, directory, scheme))


async def _serve(pipe: Connection, role: str, directory: str, scheme: str) -> None:
    from cluster.channel import Channel
    from engine.block_pool import BlockPool
    from engine.node import NodeLoop, Runner
    from kvtransfer.plane import KVPlane
    from kvtransfer.select import open_plane

    steps = await asyncio.to_thread(_load, directory)
    pool = BlockPool(steps.cache.num_blocks)
    runner = _Watched(steps.runner)
    config = ClusterConfig(f"{role}-bench", new_epoch(), "", "127.0.0.1", "127.0.0.1", None)
    async with Channel(config) as channel:
        loop = NodeLoop(cast(Runner, runner), steps.cache, channel)
        identity = (config.node_id, config.epoch, FINGERPRINT)
        plane = _Watched(
            open_plane([scheme], steps.cache.as_bytes(), identity, secret=None, wakeup=loop.wake_for_transfer)
        )
        state = _state(role, pool, channel.party, plane)
        running = asyncio.create_task(loop.run(state, cast(KVPlane, plane)))
        pipe.send(channel.party)
        obeying = asyncio.create_task(asyncio.to_thread(_obey, pipe, runner, plane))
        await asyncio.wait((running, obeying), return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(plane.close)


def _obey(pipe: Connection, runner: _Watched, plane: _Watched) -> None:
    with suppress(EOFError):
        while (command := pipe.recv()) != "stop":
            if command == "notes":
                pipe.send(Notes(runner.notes.steps, plane.notes.pushes, plane.notes.arrivals))
                runner.notes, plane.notes = Notes(), Notes()
            else:
                plane.silent = command == "silent"
                pipe.send(None)


def _load(directory: str) -> Any:
    from pathlib import Path

    import torch

    from bench.model_steps import Steps
    from cluster.config import cache_dir, compilers
    from kernels.backend import select

    torch.set_num_threads(1)
    ops = select("cpu", "auto", cache_dir=cache_dir() / "kernels", threads=1, compilers=compilers())
    steps = Steps(Path(directory), ops, "float32", NUM_TOKENS)
    steps.runner.warm_up()
    return steps


def _state(role: str, pool: Any, party: Party, plane: Any) -> Any:
    from decode_node.reservation import DecodeSettings
    from decode_node.scheduler import DecodeState
    from kvtransfer.ticket import new_ticket_id
    from prefill_node.admission import PrefillSettings
    from prefill_node.scheduler import PrefillState

    limit = NUM_TOKENS // 2
    if role == "prefill":
        return PrefillState(
            pool,
            PrefillSettings(
                block_size=BLOCK_SIZE,
                num_blocks=pool.num_blocks,
                max_batch_tokens=CHUNK_TOKENS,
                max_active=4,
                max_model_len=limit,
                fingerprint=FINGERPRINT,
            ),
        )
    settings = DecodeSettings(
        block_size=BLOCK_SIZE,
        num_blocks=pool.num_blocks,
        max_num_seqs=4,
        max_model_len=limit,
        fingerprint=FINGERPRINT,
    )
    return DecodeState(pool, settings, party, plane.hello, new_ticket_id)
