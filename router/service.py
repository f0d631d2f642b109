"""Puts a router together: control channel, registry, queue, dispatcher, HTTP; and takes it down in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette

from cluster.api_keys import KeyRing
from cluster.channel import Channel, ChannelError
from cluster.config import ClusterConfig, ConfigError, is_loopback, url_host
from cluster.directory import PrefixFollower
from cluster.membership import Membership
from cluster.model_store import read_config, resolve_model
from cluster.wire import Pong
from router.admin import RouterView, create_admin_app
from router.app import FrontSettings, create_app
from router.cluster_metrics import ClusterMetrics
from router.directory_index import DirectoryIndex
from router.dispatch import Dispatcher, DispatchSettings
from router.limits import KeyLimits
from router.mailbox import Switchboard
from router.metrics import Metrics
from router.placement import Placer
from router.protocol import BoundedHttpProtocol
from router.queue import WaitingLine
from router.registry import NodeRegistry
from router.tokenizer import Tokenizer
from router.tool_formats import ParserName, ToolFormat

log = logging.getLogger(__name__)

# Longer than any client pool keeps an idle connection, so that the client closes first.
KEEP_ALIVE_S = 75
DRAIN_S = 5
UNFOLLOW_S = 2
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything a router is told.

    ``admin_port`` None: no operator's port. ``num_workers`` processes divide the keys' limits among them, and listen
    on one port with ``reuse_port``.
    """

    cluster: ClusterConfig
    model: str
    served_name: str | None
    max_model_len: int | None
    host: str
    port: int
    max_waiting: int
    max_wait_s: float
    keys: KeyRing
    cors_origins: tuple[str, ...] = ()
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    num_workers: int = 1
    reuse_port: bool = False
    tool_call_parser: ParserName = "auto"


async def serve(config: RouterConfig) -> int:
    """Run until SIGTERM or SIGINT. Returns the process's exit status; raises for settings that cannot work."""
    files = resolve_model(config.model)
    facts = read_config(files.directory)
    tokenizer = Tokenizer.from_directory(
        files.directory, eos_token_ids=facts.eos_token_ids, vocab_size=facts.vocab_size
    )
    tool_format = _tool_format(config, tokenizer)
    async with AsyncExitStack() as stack:
        try:
            channel = await stack.enter_async_context(Channel(config.cluster, background_io=True))
        except ChannelError as error:
            raise ConfigError(str(error)) from error
        plant = _Plant(config, channel)
        stack.push_async_callback(plant.close)
        settings = FrontSettings(
            served_name=config.served_name or files.served_name,
            max_model_len=min(config.max_model_len or facts.max_model_len, facts.max_model_len),
            version=_version(),
            cors_origins=config.cors_origins,
            tool_format=tool_format,
        )
        metrics = Metrics()
        metrics.registry.register(ClusterMetrics(plant.registry, plant.line, plant.switchboard))
        limits = KeyLimits(config.num_workers)
        app = create_app(settings, tokenizer, plant.dispatcher, metrics, keys=config.keys, limits=limits)
        if config.admin_port is not None:
            view = RouterView(plant.registry, plant.line, plant.switchboard, limits, config.cluster.node_id)
            admin = create_admin_app(view, plant.dispatcher, metrics)
            await stack.enter_async_context(_serving_admin(admin, config.admin_host, config.admin_port))
        with bind(config.host, config.port, reuse_port=config.reuse_port) as sock:
            sock.listen(BACKLOG)  # from here on nobody is refused; uvicorn accepts as soon as it runs
            log.info("listening on http://%s:%d", url_host(config.host), sock.getsockname()[1])
            if not config.keys and not is_loopback(config.host):
                log.warning("other machines can reach %s and no API keys are set: anybody may ask", config.host)
            await _run(app, sock, plant)
    return 0


@asynccontextmanager
async def _serving_admin(app: Starlette, host: str, port: int) -> AsyncIterator[None]:
    with bind(host, port) as sock:
        log.info("operator's port: http://%s:%d", url_host(host), sock.getsockname()[1])
        server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield
        finally:
            server.should_exit = True
            await serving


class _Plant:
    """Everything behind the HTTP front, wired together. Owns the Redis connections."""

    def __init__(self, config: RouterConfig, channel: Channel) -> None:
        self._channel = channel
        self._membership = Membership(config.cluster.redis_url)
        self._follower = PrefixFollower(config.cluster.redis_url)
        self.switchboard = Switchboard(channel)
        self.registry = NodeRegistry(
            self._membership,
            channel,
            on_lost=self.switchboard.lost,
            on_dead=self.switchboard.dead,
            on_change=self._pump,
        )
        self.index = DirectoryIndex(self._follower, lambda: [node.party for node in self.registry.all_nodes()])
        placer = Placer(self.registry, self.index)
        self.line = WaitingLine(
            placer.try_place, placer.release, max_waiting=config.max_waiting, max_wait_s=config.max_wait_s
        )
        self.dispatcher = Dispatcher(self.switchboard, placer, self.line, DispatchSettings())

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self.registry.run())
            tasks.create_task(self.index.run())
            tasks.create_task(self.switchboard.resend())

    async def close(self) -> None:
        """Close the Redis connections."""
        await self._membership.close()
        await self._follower.close()

    def _pump(self) -> None:
        self.line.pump()

    async def _receive(self) -> None:
        while True:
            envelope = await self._channel.receive()
            match envelope.body:
                case Pong():
                    self.registry.on_pong(envelope.sender, envelope.body, time.monotonic())
                case _:
                    self.switchboard.deliver(envelope.sender, envelope.body)


class _Server(uvicorn.Server):
    """uvicorn in our event loop: the process handles its own signals."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


async def _run(app: FastAPI, sock: socket.socket, plant: _Plant) -> None:
    server = _Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # nothing here asks who the client is
            log_config=None,  # its lines go through our formatter, which lets no control character pass
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, setattr, server, "should_exit", True)
    following = asyncio.create_task(plant.run())
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        done, _pending = await asyncio.wait((following, serving), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        following.cancel()
        # A library may swallow a cancellation; what is left then is cancelled again, one by one, as the loop ends.
        await asyncio.wait((following,), timeout=UNFOLLOW_S)
    if following in done:
        log.error("following the cluster failed", exc_info=following.exception())
        raise ConfigError("the router lost touch with the cluster and cannot go on")


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket for uvicorn to listen on. Raises :class:`ConfigError` if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off for what is accepted here; with it on, tokens wait
    # up to 40 ms for the client's acknowledgement of the last one.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another port, or 0") from error
    return sock


def _tool_format(config: RouterConfig, tokenizer: Tokenizer) -> ToolFormat:
    try:
        return tokenizer.tool_format(config.tool_call_parser)
    except ValueError as error:
        raise ConfigError(f"--tool-call-parser {config.tool_call_parser}: {error}") from error


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"
