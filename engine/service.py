"""Starts a node: model, KV pool, control channel, KV plane, registration, HTTP; and takes it down in order."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.channel import Channel, ChannelError
from cluster.config import ConfigError, cache_dir, compilers
from cluster.directory import PrefixPublisher
from cluster.garbage import return_freed_memory
from cluster.membership import Membership, MembershipError, NodeRecord, Role
from cluster.model_store import ModelFilesError, read_config, resolve_model, weights_id
from cluster.wire import Party
from engine.block_pool import BlockPool
from engine.grammar import GrammarError, Grammars
from engine.instructions import NodeState
from engine.kv_cache import KVCache, kv_cache
from engine.model import LlamaModel
from engine.model_config import Dtype, ModelConfig
from engine.node import LifeEndedError, NodeLoop
from engine.node_config import RESTART, NodeConfig
from engine.node_http import NodeView, serve_http
from engine.runner import ModelRunner
from engine.weights import load_weights
from kernels.backend import Backend, BackendError, select
from kvtransfer.errors import KVTransferError
from kvtransfer.plane import KVPlane
from kvtransfer.select import open_plane

log = logging.getLogger(__name__)

DTYPES: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a role builds its state from."""

    config: NodeConfig
    pool: BlockPool
    plane: KVPlane
    party: Party
    fingerprint: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Engine:
    runner: ModelRunner
    cache: KVCache
    fingerprint: str
    facts: dict[str, str]
    max_model_len: int


async def serve_node(config: NodeConfig, role: Role, build_state: Callable[[NodeParts], NodeState]) -> int:
    """:func:`run_node` as a process: failures are logged; returns the exit status (2, or ``RESTART``)."""
    try:
        await run_node(config, role, build_state)
    except (ConfigError, ModelFilesError, ChannelError, KVTransferError, OSError) as error:
        log.error("cannot serve: %s", error)
        return 2
    except LifeEndedError as error:
        log.error("%s; starting again as another life", error)
        return RESTART
    return 0


async def run_node(config: NodeConfig, role: Role, build_state: Callable[[NodeParts], NodeState]) -> None:
    """Serve until SIGTERM or SIGINT, then leave the cluster and give everything back.

    Raises :class:`ConfigError` or a model error if the node cannot start (nothing is registered then), and
    :class:`LifeEndedError` if only another life of it can go on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    engine = await asyncio.to_thread(_load_engine, config, role)
    pool = BlockPool(engine.cache.num_blocks)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(Channel(config.cluster))
        node_loop = NodeLoop(engine.runner, engine.cache, channel)
        plane = open_plane(
            config.transports,
            engine.cache.as_bytes(),
            (config.cluster.node_id, config.cluster.epoch, engine.fingerprint),
            host=config.cluster.advertise_host,
            secret=config.cluster.secret,
            wakeup=node_loop.wake_for_transfer,
            digest=config.kv_digest,
            layout=engine.cache.layout,
            require=config.require_transport,
            memory=engine.cache.memory,
            device=engine.cache.device,
        )
        stack.push_async_callback(asyncio.to_thread, plane.close)
        parts = NodeParts(config, pool, plane, channel.party, engine.fingerprint, engine.max_model_len)
        state = build_state(parts)
        view = NodeView(role, config.cluster.node_id, state, pool, plane, time.monotonic)
        http_port = await stack.enter_async_context(serve_http(view, config.cluster.bind_host, config.http_port))
        record = NodeRecord(
            role=role,
            party=channel.party,
            http_address=f"http://{config.cluster.advertise_host}:{http_port}",
            fingerprint=engine.fingerprint,
            layout=engine.facts,
            block_size=config.block_size,
            num_blocks=pool.num_blocks,
            max_model_len=engine.max_model_len,
            transports=plane.schemes,
        )
        await stack.enter_async_context(_registered(config, record, pool))
        log.info("%s node %s is up: %d blocks of %d tokens", role, record.party.id, pool.num_blocks, config.block_size)
        await _run_until(stop, node_loop.run(state, plane))
    log.info("%s node %s has left", role, config.cluster.node_id)


async def _run_until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    running = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    done, _pending = await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        pass
    except BaseExceptionGroup as group:
        if (ended := group.subgroup(LifeEndedError)) is None:
            raise
        raise LifeEndedError(str(ended.exceptions[0])) from None
    if running in done and not stop.is_set():
        raise ConfigError("the node's loop ended by itself")


@asynccontextmanager
async def _registered(config: NodeConfig, record: NodeRecord, pool: BlockPool) -> AsyncIterator[None]:
    """Be in Redis: the record from now on, the prefix names as they change; gone again at the end."""
    membership = Membership(config.cluster.redis_url)
    publisher = PrefixPublisher(config.cluster.redis_url, record.party, pool.drain_name_changes)
    tasks = [asyncio.create_task(membership.keep_registered(record)), asyncio.create_task(publisher.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await publisher.remove()
                await membership.remove(record.party.id)
        except (MembershipError, TimeoutError) as error:
            log.warning("left without telling Redis: %s", error)
        await publisher.close()
        await membership.close()


def memory_use() -> tuple[int, int]:
    """Bytes of this process in memory now, and the most there ever were."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        resident = peak
    return resident, peak


def _select_backend(config: NodeConfig) -> Backend:
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if config.backend in ("auto", "triton") and torch.cuda.is_available() else "cpu"
    try:
        ops = select(
            device, config.backend, cache_dir=cache_dir() / "kernels", threads=config.threads, compilers=compilers()
        )
        ops.row_dtype(DTYPES[config.dtype])
    except BackendError as error:
        raise ConfigError(f"--device {device} --backend {config.backend} --dtype {config.dtype}: {error}") from error
    return ops


def _load_engine(config: NodeConfig, role: Role) -> _Engine:
    import torch

    torch.set_num_threads(config.threads)
    began = time.monotonic()
    files = resolve_model(config.model)
    model_config = ModelConfig.from_directory(files.directory)
    dtype = DTYPES[config.dtype]
    ops = _select_backend(config)
    grammars = _load_grammars(files.directory, model_config)
    weights = load_weights(files.directory, model_config, ops, dtype)
    layout = model_config.kv_layout(config.block_size, dtype, ops.key_order)
    max_model_len = min(config.max_model_len or model_config.max_positions, model_config.max_positions)
    num_blocks = config.kv_blocks or max(1, config.kv_memory_bytes // layout.block_bytes)
    # Decode nodes send nothing, and read their pool at every step: huge pages are for them.
    cache = kv_cache(layout, num_blocks, ops.device, shared=role == "prefill")
    model = LlamaModel(model_config, weights)
    model.reserve(max(config.max_batch_tokens, config.max_num_seqs), config.max_num_seqs)
    runner = ModelRunner(model, cache, grammars)
    log.info(
        "%s loaded in %.1f s on the %s backend (%s) as %s; %.0f MB resident, %.0f MB at most",
        files.served_name,
        time.monotonic() - began,
        ops.name,
        ops.device,
        config.dtype,
        *(num_bytes / 1e6 for num_bytes in memory_use()),
    )
    log.info("warmed up in %.1f s with %d threads", runner.warm_up(), config.threads)
    # Weights of another type make other keys and values, though the blocks may look the same.
    names = (weights_id(files.directory), f"{model_config.tag},weights={dtype}")
    return _Engine(runner, cache, layout.fingerprint(*names), layout.facts(*names), max_model_len)


def _load_grammars(directory: Path, model_config: ModelConfig) -> Grammars:
    """To be called before the weights are there: reading a tokenizer takes 25 MB more than it keeps."""
    eos_token_ids = read_config(directory).eos_token_ids
    grammars = Grammars(directory / "tokenizer.json", model_config.vocab_size, eos_token_ids)
    try:
        grammars.load()
    except GrammarError as error:
        log.warning("requests with a grammar will fail here: %s", error)
    return_freed_memory()
    return grammars
