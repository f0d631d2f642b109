"""A prefill and a decode node with everything real but the model's size and the control channel.

Their loops, states, block pools, KV memory and KV planes are those of a deployment; messages go through queues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count, zip_longest
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.envelope import Envelope
from cluster.prefix_hash import block_hashes, seed_hash
from cluster.request import RequestId, RequestKey, SamplingParams, TokenLogprobs
from cluster.wire import (
    Cancel,
    CancelChoice,
    Cancelled,
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
from kernels.backend import Backend
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
Answer = list[tuple[int, TokenLogprobs | None]]


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
        self,
        model: LlamaModel,
        line: Line,
        scheme: str,
        digest: str,
        role: str,
        block_size: int,
        require: str | None = None,
    ) -> None:
        self.party, self.block_size = line.party, block_size
        num_blocks = NUM_BLOCKS * BLOCK_SIZE // block_size
        self.pool = BlockPool(num_blocks)
        scheme, _, sharing = scheme.partition("-")
        self.cache = KVCache(model.kv_layout(block_size), num_blocks, shared=bool(sharing) and role == "prefill")
        self._loop = NodeLoop(ModelRunner(model, self.cache), self.cache, line)
        self.plane = open_plane(
            [scheme],
            self.cache.as_bytes(),
            (line.party.id, line.party.epoch, FINGERPRINT),
            secret=None,
            wakeup=self._loop.wake_for_transfer,
            digest=digest,
            layout=self.cache.layout,
            require=require,
            memory=self.cache.memory,
        )
        shared = {"block_size": block_size, "num_blocks": num_blocks, "max_model_len": MAX_MODEL_LEN}
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
        answers = await self.ask_choices(prompt, SamplingParams(max_tokens=max_tokens))
        return answers if isinstance(answers, Failed) else [item[0] for item in answers[0]]

    async def ask_choices(self, prompt: Sequence[int], sampling: SamplingParams) -> dict[int, Answer] | Failed:
        """Every choice's tokens with their log-probabilities, or why there are none."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._ask(tuple(prompt), sampling)

    async def abandon(
        self, prompt: Sequence[int], sampling: SamplingParams, *, after: int, cut: Sequence[int] = ()
    ) -> None:
        """Ask, hear ``after`` messages at most, end the choices ``cut``, and cancel; both nodes confirm."""
        async with asyncio.timeout(DEADLINE_S):
            key, inbox = next(self._names), asyncio.Queue[Message]()
            self._inboxes[key] = inbox
            prefill, decode, send = self.prefill.party, self.decode.party, self._router.send
            names = block_hashes(SEED, prompt, self.decode.block_size)
            send(decode, Reserve(key, prefill, len(prompt), SEED, names, sampling, DEADLINE_S))
            heard = await inbox.get() if after else None
            if isinstance(heard, Granted):
                names = block_hashes(SEED, prompt, self.prefill.block_size)
                send(prefill, Submit(key, tuple(prompt), names, sampling, heard.ticket, DEADLINE_S))
            ended = 0
            for _ in range(after - 1):
                message = await inbox.get()
                lasts = message.items if isinstance(message, Tokens) else getattr(message, "choices", ())
                ended += sum(each.finish_reason is not None for each in lasts)
                if ended == sampling.num_choices or isinstance(message, Failed):
                    break
            for choice in cut:
                send(decode, CancelChoice(key, choice))
            for party in (prefill, decode):
                send(party, Cancel(key))
            num_confirmed = 0
            while num_confirmed < 2:
                num_confirmed += isinstance(await inbox.get(), Cancelled)

    async def at_rest(self) -> None:
        """Until both nodes hold no request."""
        async with asyncio.timeout(DEADLINE_S):
            while self.prefill.state.report() or self.decode.state.report():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)

    async def _ask(self, prompt: tuple[int, ...], sampling: SamplingParams) -> dict[int, Answer] | Failed:
        key, send = next(self._names), self._router.send
        inbox = self._inboxes[key] = asyncio.Queue()
        prefill, decode = self.prefill.party, self.decode.party
        names = block_hashes(SEED, prompt, self.decode.block_size)
        send(decode, Reserve(key, prefill, len(prompt), SEED, names, sampling, DEADLINE_S))
        granted = await inbox.get()
        assert isinstance(granted, Granted), granted
        names = block_hashes(SEED, prompt, self.prefill.block_size)
        send(prefill, Submit(key, prompt, names, sampling, granted.ticket, DEADLINE_S))
        answers: dict[int, Answer] = {each.choice: [] for each in sampling.choices()}
        open_choices, begun = set(answers), False
        while True:
            match await inbox.get():
                case Failed() as failed:
                    return failed
                case Token0(_key, choices):
                    begun = True
                    for first in choices:
                        answers[first.choice].insert(0, (first.token_id, first.logprobs))
                        if first.finish_reason is not None:
                            open_choices.remove(first.choice)
                case Tokens(_step, items):
                    for item in items:
                        if item.key == key:
                            answers[item.choice] += zip_longest(item.token_ids, item.logprobs)
                            if item.finish_reason is not None:
                                open_choices.remove(item.choice)
                case Cancelled():
                    pass
            if begun and not open_choices:
                return answers


def tiny_model(directory: Path, ops: Backend | None = None) -> LlamaModel:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    config = ModelConfig.from_directory(directory)
    return LlamaModel(config, load_weights(directory, config, ops or Reference()))


@asynccontextmanager
async def real_pair(
    directory: Path,
    scheme: str,
    digest: str = "sampled",
    *,
    backend: Callable[[], Backend] = Reference,
    block_sizes: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE),
    require: str | None = None,
) -> AsyncIterator[RealPair]:
    """Both nodes run; afterwards they hold nothing.

    ``block_sizes`` are the prefill and the decode node's, ``require`` is the prefill node's.
    """
    torch.set_num_threads(1)
    hub, (ours, theirs) = Hub(), block_sizes
    prefill = RealNode(tiny_model(directory, backend()), hub.open("P"), scheme, digest, "prefill", ours, require)
    decode = RealNode(tiny_model(directory, backend()), hub.open("D"), scheme, digest, "decode", theirs)
    pair = RealPair(hub, prefill, decode)
    try:
        tasks = [asyncio.create_task(work()) for work in (prefill.run, decode.run, pair.listen)]
        yield pair
        await pair.at_rest()
        for node in (prefill, decode):
            assert node.state.check() == ()
            assert node.pool.num_free == node.pool.num_blocks
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
