"""A prefill and a decode node without engines, for `baton bench router`.

`python -m bench.router_nodes REDIS_URL STEP_S [STAMPS_FILE]`: both answer at once; the decode node runs steps as a real
one does, one `Tokens` message a step of `STEP_S` seconds with a token of every request. When it sent each token of the
latest request is written to the file, by the token's index: see :class:`Stamps`.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
import time
from pathlib import Path

import uvloop

from bench.router_client import NUM_TOKENS
from cluster.channel import Channel
from cluster.config import ClusterConfig, new_epoch
from cluster.envelope import Envelope
from cluster.membership import Membership, NodeRecord, Role
from cluster.request import FinishReason, RequestKey
from cluster.wire import (
    Acknowledged,
    Cancel,
    Cancelled,
    Capsule,
    Commit,
    FirstToken,
    Granted,
    Message,
    NodeLoad,
    Party,
    Ping,
    Pong,
    Reserve,
    StartedChoice,
    Submit,
    Ticket,
    Token0,
    TokenItem,
    Tokens,
)

NUM_BLOCKS, BLOCK_SIZE, FINGERPRINT = 100_000, 16, "bench"
TOKEN_ID = 284  # " and" of the demo model; any text will do


class Stamps:
    """A ``time.monotonic()`` for each token of one answer, in a file that the nodes and the client share."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * NUM_TOKENS))
        with path.open("r+b") as file:
            self._times = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def set(self, index: int) -> None:
        """That token is sent now."""
        self._times[index] = time.monotonic()

    def all(self) -> list[float]:
        """Those of the latest request."""
        return [float(time_s) for time_s in self._times]


class BenchNode:
    """Either role: what differs is what it answers. ``running`` holds (router, next index, max_tokens) by request."""

    def __init__(self, role: Role, redis_url: str, step_s: float, stamps: Stamps | None) -> None:
        self._stamps = stamps
        self._role: Role = role
        self._step_s = step_s
        self._redis_url = redis_url
        self.channel = Channel(ClusterConfig(f"bench-{role}", new_epoch(), redis_url, "127.0.0.1", "127.0.0.1", None))
        self._routers: dict[RequestKey, Party] = {}
        self._running: dict[RequestKey, list[int]] = {}
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self.channel, asyncio.TaskGroup() as tasks:
            record = NodeRecord(
                role=self._role,
                party=self.channel.party,
                http_address="http://127.0.0.1:1",
                fingerprint=FINGERPRINT,
                block_size=BLOCK_SIZE,
                num_blocks=NUM_BLOCKS,
                max_model_len=8192,
                transports=("tcp",),
            )
            tasks.create_task(Membership(self._redis_url).keep_registered(record))
            tasks.create_task(self._listen())
            tasks.create_task(self._step())

    async def _listen(self) -> None:
        while True:
            self._on(await self.channel.receive())

    def _on(self, envelope: Envelope) -> None:
        sender, body = envelope.sender, envelope.body
        match body:
            case Ping(sequence):
                self._send(sender, Pong(sequence, NodeLoad(total_blocks=NUM_BLOCKS)))
            case Cancel(key):
                self._running.pop(key, None)
                self._send(sender, Cancelled(key, 0, 0))
            case Reserve(key=key):
                self._routers[key] = sender
                self._send(sender, Granted(key, Ticket(self.channel.party, FINGERPRINT, BLOCK_SIZE, 0, 1, b"")))
            case Submit():
                self._prefill(sender, body)
            case Commit(key, capsule):
                self._send(sender, Acknowledged(key))
                self._running[key] = [1, capsule.sampling.max_tokens]
                self._work.set()

    def _prefill(self, router: Party, submit: Submit) -> None:
        if submit.ticket is None:
            self._send(router, Token0(submit.key, (), 0, 0.0, 0.0))
            return
        finish: FinishReason | None = "length" if submit.sampling.max_tokens == 1 else None
        self._send(router, Token0(submit.key, (FirstToken(0, TOKEN_ID, finish),), 0, 0.0, 0.0))
        if finish is None:
            capsule = Capsule(len(submit.prompt_token_ids), (StartedChoice(0, TOKEN_ID),), 1, (), submit.sampling)
            self._send(submit.ticket.decode, Commit(submit.key, capsule))
        else:
            self._send(submit.ticket.decode, Cancelled(submit.key, 0, 0))

    async def _step(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self._step_s)
            items: dict[Party, list[TokenItem]] = {}
            for key, state in list(self._running.items()):
                index, limit = state
                finish: FinishReason | None = "length" if index + 1 >= limit else None
                router = self._routers[key]
                items.setdefault(router, []).append(TokenItem(key, index, (TOKEN_ID,), finish))
                if self._stamps is not None:
                    self._stamps.set(index)
                state[0] += 1
                if finish is not None:
                    del self._running[key], self._routers[key]
            for router, new in items.items():
                self._send(router, Tokens(0, tuple(new)))
            if not self._running:
                self._work.clear()

    def _send(self, party: Party, message: Message) -> None:
        self.channel.send(party, message)


async def main(redis_url: str, step_s: float, stamps: Stamps | None) -> None:
    """Both nodes in this process."""
    async with asyncio.TaskGroup() as tasks:
        for role in ("prefill", "decode"):
            tasks.create_task(BenchNode(role, redis_url, step_s, stamps).run())


if __name__ == "__main__":
    url, step, *file = sys.argv[1:]
    uvloop.run(main(url, float(step), Stamps(Path(file[0])) if file else None))
