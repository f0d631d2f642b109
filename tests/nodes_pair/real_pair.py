"""A prefill and a decode node with everything real but the model's size and the control channel.

Their loops, states, block pools, KV memory and KV planes are those of a deployment; messages go through queues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.prefix_hash import block_hashes, seed_hash
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import (
    Cancelled,
    Envelope,
    Failed,
    Granted,
    Message,
    Party,
    Ping,
    Pong,
    Reserve,
    Submit,
    Token0,
    Tokens,
)
from decode_node.reservation import DecodeSettings
from decode_node.scheduler import DecodeState
from engine.block_pool import BlockPool
from engine.instructions import NodeState
from engine.kv_cache import KVCache
from engine.model import LlamaModel
from engine.model_config import ModelConfig
from engine.node import NodeLoop
from engine.runner import ModelRunner
from engine.weights import load_weights
from kernels.reference import Reference
from kvtransfer.select import open_plane
from kvtransfer.ticket import new_ticket_id
from prefill_node.admission import PrefillSettings
from prefill_node.scheduler import PrefillState
from tests.engine.tiny_model import CONFIG, tensors

BLOCK_SIZE = 4
NUM_BLOCKS = 60
MAX_MODEL_LEN = 64
FINGERPRINT = "tiny"
SEED = seed_hash(FINGERPRINT)
DEADLINE_S = 30.0


class Hub:
    """All control channels."""

    def __init__(self) -> None:
        self._inboxes: dict[Party, asyncio.Queue[Envelope]] = {}
        self._epochs = count(1)

    def open(self, name: str) -> Line:
        party = Party(name, next(self._epochs), "tcp://127.0.0.1:1")
        self._inboxes[party] = asyncio.Queue()
        return Line(party, self._inboxes)


class Line:
    """One party's channel, as :class:`cluster.channel.Channel`."""

    def __init__(self, party: Party, inboxes: dict[Party, asyncio.Queue[Envelope]]) -> None:
        self.party = party
        self._inboxes = inboxes

    def send(self, peer: Party, message: Message) -> None:
        self._inboxes[peer].put_nowait(Envelope(self.party, peer.epoch, message))

    async def receive(self) -> Envelope:
        return await self._inboxes[self.party].get()


class RealNode:
    """One node; ``state`` decides, ``pool`` keeps the books, ``cache`` has the bytes."""

    def __init__(
        self, model: LlamaModel, line: Line, scheme: str, digest: str, role: str, require: str | None = None
    ) -> None:
        self.party = line.party
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = KVCache(model.kv_layout(BLOCK_SIZE), NUM_BLOCKS)
        self._loop = NodeLoop(ModelRunner(model, self.cache), self.cache, line)
        self.plane = open_plane(
            [scheme],
            self.cache.as_bytes(),
            (line.party.id, line.party.epoch, FINGERPRINT),
            secret=None,
            wakeup=self._loop.wake_for_transfer,
            digest=digest,
            require=require,
        )
        shared = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN}
        self.state: NodeState
        if role == "prefill":
            settings = PrefillSettings(**shared, max_batch_tokens=9, max_active=3, fingerprint=FINGERPRINT)
            self.state = PrefillState(self.pool, settings)
        else:
            settings = DecodeSettings(**shared, max_num_seqs=8, fingerprint=FINGERPRINT)
            self.state = DecodeState(self.pool, settings, line.party, self.plane.hello, new_ticket_id)

    async def run(self) -> None:
        await self._loop.run(self.state, self.plane)

    def poison(self, marker: float) -> None:
        """Overwrite every block that holds nothing of use: free ones no lookup can find, those in quarantine."""
        for block_id, block in enumerate(self.pool._blocks):
            if not block.owners and block.name is None:
                self.cache.pool[block_id] = marker


class RealPair:
    """``ask`` plays the router."""

    def __init__(self, hub: Hub, prefill: RealNode, decode: RealNode) -> None:
        self.prefill, self.decode = prefill, decode
        self._router = hub.open("R")
        self._names = (RequestKey(RequestId(f"r{number}"), 1) for number in count())
        self._inboxes: dict[RequestKey, asyncio.Queue[Message]] = {}
        self._pongs: asyncio.Queue[Pong] = asyncio.Queue()

    async def ping(self, node: RealNode) -> Pong:
        self._router.send(node.party, Ping(1))
        async with asyncio.timeout(DEADLINE_S):
            return await self._pongs.get()

    async def listen(self) -> None:
        while True:
            body = (await self._router.receive()).body
            if isinstance(body, Pong):
                self._pongs.put_nowait(body)
                continue
            keys = [item.key for item in body.items] if isinstance(body, Tokens) else [body.key]
            for key in dict.fromkeys(keys):
                self._inboxes[key].put_nowait(body)

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> list[int] | Failed:
        """The answer, or why there is none; raises TimeoutError if neither comes."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._ask(tuple(prompt), SamplingParams(max_tokens=max_tokens))

    async def at_rest(self) -> None:
        """Until both nodes hold no request."""
        async with asyncio.timeout(DEADLINE_S):
            while self.prefill.state.report() or self.decode.state.report():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)

    async def _ask(self, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int] | Failed:
        key, send = next(self._names), self._router.send
        inbox = self._inboxes[key] = asyncio.Queue()
        names = block_hashes(SEED, prompt, BLOCK_SIZE)
        prefill, decode = self.prefill.party, self.decode.party
        send(decode, Reserve(key, prefill, len(prompt), SEED, names, sampling, DEADLINE_S))
        granted = await inbox.get()
        assert isinstance(granted, Granted), granted
        send(prefill, Submit(key, prompt, names, sampling, granted.ticket, DEADLINE_S))
        answer: list[int] = []
        while True:
            match await inbox.get():
                case Failed() as failed:
                    return failed
                case Token0(_key, token_id):
                    answer.insert(0, token_id)
                case Tokens(_step, items):
                    answer += [token for item in items if item.key == key for token in item.token_ids]
                case Cancelled():
                    pass
            if len(answer) == sampling.max_tokens:
                return answer


def tiny_model(directory: Path) -> LlamaModel:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    config = ModelConfig.from_directory(directory)
    return LlamaModel(config, load_weights(directory, config, Reference()))


@asynccontextmanager
async def real_pair(
    directory: Path, scheme: str, digest: str = "sampled", require: str | None = None
) -> AsyncIterator[RealPair]:
    """Both nodes run; afterwards they hold nothing. ``require`` is the prefill node's."""
    torch.set_num_threads(1)
    hub, model = Hub(), tiny_model(directory)
    prefill = RealNode(model, hub.open("P"), scheme, digest, "prefill", require)
    decode = RealNode(tiny_model(directory), hub.open("D"), scheme, digest, "decode")
    pair = RealPair(hub, prefill, decode)
    try:
        tasks = [asyncio.create_task(work()) for work in (prefill.run, decode.run, pair.listen)]
        yield pair
        await pair.at_rest()
        for node in (prefill, decode):
            assert node.state.check() == ()
            assert node.pool.num_free == NUM_BLOCKS
            stats = node.plane.stats()
            assert (stats.open_tickets, stats.open_pushes) == (0, 0)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        for node in (prefill, decode):
            await asyncio.to_thread(node.plane.close)
