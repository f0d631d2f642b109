"""`baton up`: a whole deployment on this machine, in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from cli import embedded_redis
from cli.children import Child, Children
from cli.cores import share_cores
from cli.model import pull_demo_model
from cli.startup import Startup
from cluster.api_keys import new_key
from cluster.config import ENV_API_KEY, ENV_REDIS_URL, ENV_SECRET, ConfigError, api_key, shared_secret, url_host
from cluster.model_store import DEMO_MODEL, ModelFiles, ModelFilesError, resolve_model

if TYPE_CHECKING:
    from cli.model import Subparsers

DESCRIPTION = """Start a router, prefill nodes, decode nodes and (without --redis) a private Redis as processes of this
machine, wait until a request has been served end to end, and run until Ctrl-C."""
# The router drains while its nodes still serve; the nodes leave while Redis still listens.
_REDIS_STAGE, _NODE_STAGE, _ROUTER_STAGE = 0, 1, 2


def add_parser(commands: Subparsers) -> None:
    """Add `baton up`."""
    parser = commands.add_parser(
        "up",
        help="serve a model on this machine",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: baton up --prefill 2 --decode 2 --port 8000",
    )
    parser.add_argument("--model", default=DEMO_MODEL, help="name, Hugging Face directory or hub id")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill nodes")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode nodes")
    parser.add_argument("--host", default="127.0.0.1", help="interface of the HTTP endpoint")
    parser.add_argument("--port", type=int, default=8000, help="port of the HTTP endpoint; 0: any free one")
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="who may ask; see `baton keys new --help`")
    parser.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="a site that may call us")
    parser.add_argument("--admin-port", type=int, metavar="PORT", help="operator's port of the router; 0: any free one")
    parser.add_argument("--tool-call-parser", default="auto", help="auto, hermes or llama3_json")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="router processes")
    parser.add_argument("--redis", metavar="URL", help="use this Redis instead of starting a private one")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="where the processes log (default: a new one)")
    parser.add_argument("--state-file", type=Path, metavar="FILE", help="write URLs and process ids there when ready")
    parser.add_argument("--ready-timeout-s", type=float, default=180, metavar="S", help="give up starting after this")
    nodes = parser.add_argument_group("passed on to the nodes (see python -m prefill_node --help)")
    nodes.add_argument("--dtype", default="fp32", help="fp32, bf16 or int8")
    nodes.add_argument("--backend", default="auto", help="auto, native, reference or triton")
    nodes.add_argument("--device", default="auto", help="auto, cpu or cuda")
    nodes.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    nodes.add_argument("--kv-blocks", type=int, metavar="N")
    nodes.add_argument("--kv-memory-gb", type=float, default=1.0, metavar="GB")
    nodes.add_argument("--max-batch-tokens", type=int, default=512, metavar="TOKENS")
    nodes.add_argument("--max-num-seqs", type=int, default=64, metavar="N")
    nodes.add_argument("--max-model-len", type=int, metavar="TOKENS")
    nodes.add_argument("--transport", default="ucx,tcp", metavar="LIST")
    nodes.add_argument("--require-transport", metavar="KIND", help="rdma, cuda, shm or tcp (default: no demand)")
    nodes.add_argument("--kv-digest", default="sampled", help="off, sampled or full")
    nodes.add_argument("--threads", type=int, default=0, help="per node; 0: one per CPU of the node's share")
    nodes.add_argument("--no-pin", action="store_true", help="do not give each node CPUs of its own")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class State:
    """What `--state-file` holds. ``redis_url`` contains the password: the file is for this user only."""

    base_url: str
    redis_url: str
    log_dir: str
    pids: dict[str, int]


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    if args.prefill < 1 or args.decode < 1:
        raise ConfigError("at least one prefill node and one decode node are needed")
    if args.port:
        _check_port(args.host, args.port)
    model = _find_model(args.model)  # before any signal handler: a download ends as any program does
    return asyncio.run(_Deployment(args, model).run())


class _Deployment:
    """Owns the children and the folder of their logs."""

    def __init__(self, args: argparse.Namespace, model: ModelFiles) -> None:
        self._args = args
        self._model = model
        self._console = Console(stderr=True, highlight=False)
        self._log_dir: Path = args.log_dir or Path(tempfile.mkdtemp(prefix="baton-"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._children = Children(self._log_dir)
        self._port: int = args.port or embedded_redis.free_port()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Start, announce, watch, stop."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._stop.set)
        try:
            starting = asyncio.create_task(self._start(self._model))
            if not await self._unless_stopped(starting):
                return 130
            self._announce(self._model, starting.result())
            return await self._watch()
        finally:
            with self._console.status("stopping"):
                await self._children.stop()
            if self._args.state_file is not None:
                self._args.state_file.unlink(missing_ok=True)

    async def _unless_stopped(self, task: asyncio.Task[str]) -> bool:
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return False

    async def _start(self, model: ModelFiles) -> str:
        """Start everything and wait until a request went through. Returns the Redis URL."""
        commands = self._commands(model)
        timeout_s = self._args.ready_timeout_s
        with Startup(self._console, len(commands) + 2, timeout_s, self._check_alive) as startup:
            redis_url: str = self._args.redis or await self._start_redis()
            secret = shared_secret()
            env = {ENV_REDIS_URL: redis_url, ENV_SECRET: os.fsdecode(secret) if secret else secrets.token_hex(32)}
            key = self._own_key()
            router_env = {**env, ENV_API_KEY: key} if key else env
            await startup.wait_for_redis(redis_url)
            for name, command in commands:
                if name == "router":
                    await self._children.start(name, command, env=router_env, stage=_ROUTER_STAGE)
                else:
                    await self._children.start(name, command, env=env, stage=_NODE_STAGE)
            await startup.wait_for_nodes(redis_url, {name for name, _command in commands} - {"router"})
            await startup.wait_for_request(self._url(), model.served_name, key)
        self._console.print(f"ready in {startup.elapsed_s:.1f} s; logs are in {self._log_dir}")
        return redis_url

    def _own_key(self) -> str | None:
        """What the first request is sent with: the operator's key, or one that only we and the router know."""
        if (given := api_key()) is not None:
            return os.fsdecode(given)
        return new_key() if self._args.api_keys is not None else None

    async def _start_redis(self) -> str:
        server = embedded_redis.prepare(self._log_dir)
        await self._children.start("redis", server.command, env={}, stage=_REDIS_STAGE, stdin=server.configuration)
        return server.url

    def _commands(self, model: ModelFiles) -> list[tuple[str, list[str]]]:
        args = self._args
        shared = ["--model", str(model.directory), "--block-size", str(args.block_size), "--dtype", args.dtype]
        shared += ["--backend", args.backend, "--device", args.device]
        shared += ["--kv-memory-gb", str(args.kv_memory_gb), "--max-batch-tokens", str(args.max_batch_tokens)]
        shared += ["--max-num-seqs", str(args.max_num_seqs), "--transport", args.transport]
        shared += ["--kv-digest", args.kv_digest, "--threads", str(args.threads)]
        if args.kv_blocks is not None:
            shared += ["--kv-blocks", str(args.kv_blocks)]
        if args.require_transport is not None:
            shared += ["--require-transport", args.require_transport]
        limit = [] if args.max_model_len is None else ["--max-model-len", str(args.max_model_len)]
        nodes = [("prefill", i) for i in range(args.prefill)] + [("decode", i) for i in range(args.decode)]
        cores = share_cores(sorted(os.sched_getaffinity(0)), len(nodes))
        commands = []
        for (role, index), cpus in zip(nodes, cores, strict=True):
            name = f"{role}-{index}"
            pin = [] if args.no_pin else ["--cpus", ",".join(map(str, cpus))]
            module = [sys.executable, "-m", f"{role}_node"]
            commands.append((name, [*module, "--node-id", name, *shared, *limit, *pin]))
        router = [sys.executable, "-m", "router", "--node-id", "router", "--model", str(model.directory)]
        router += ["--served-model-name", model.served_name, "--host", args.host, "--port", str(self._port), *limit]
        router += ["--workers", str(args.workers), *(f"--cors-origin={origin}" for origin in args.cors_origin)]
        router += ["--tool-call-parser", args.tool_call_parser]
        router += [] if args.api_keys is None else ["--api-keys", str(args.api_keys.resolve())]
        router += [] if args.admin_port is None else ["--admin-port", str(args.admin_port)]
        commands.append(("router", router))
        return commands

    def _check_alive(self) -> None:
        for child in self._children:
            if not child.alive:
                raise ConfigError(f"{child.name} ended while starting:\n{child.tail()}")

    def _url(self) -> str:
        host = "127.0.0.1" if self._args.host in ("0.0.0.0", "::") else self._args.host
        return f"http://{url_host(host)}:{self._port}"

    def _announce(self, model: ModelFiles, redis_url: str) -> None:
        if self._args.state_file is not None:
            pids = {child.name: child.process.pid for child in self._children}
            _write_private(self._args.state_file, State(self._url(), redis_url, str(self._log_dir), pids))
        print(self._url())
        print(
            f"curl {self._url()}/v1/chat/completions -H 'Content-Type: application/json' {self._key_header()}-d "
            f'\'{{"model": "{model.served_name}", "messages": [{{"role": "user", "content": '
            '"What is the capital of France?"}], "temperature": 0}\''
        )
        print("Ctrl-C stops everything.", flush=True)

    async def _watch(self) -> int:
        """Until a signal, or until there is nothing left to serve with. A lost node is reported once."""
        known: set[str] = set()
        stopping = asyncio.create_task(self._stop.wait())
        while True:
            exiting = asyncio.create_task(self._children.first_exit(known))
            await asyncio.wait((stopping, exiting), return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                exiting.cancel()
                return 0
            gone = exiting.result()
            known.add(gone.name)
            self._console.print(f"{gone.name} ended with status {gone.process.returncode}; see {gone.log}")
            if not self._can_serve():
                self._console.print("nothing is left to serve with")
                stopping.cancel()
                return 1

    def _can_serve(self) -> bool:
        left: list[Child] = [child for child in self._children if child.alive]
        kinds = {child.name.split("-")[0] for child in left}
        return "router" in kinds and (self._args.redis is not None or "redis" in kinds)

    def _key_header(self) -> str:
        return "-H 'Authorization: Bearer YOUR_KEY' " if self._own_key() else ""


def _find_model(name: str) -> ModelFiles:
    try:
        return resolve_model(name)
    except ModelFilesError as error:
        if name != DEMO_MODEL or pull_demo_model() != 0:
            raise ConfigError(str(error)) from error
        return resolve_model(name)


def _check_port(host: str, port: int) -> None:
    """Before anything is started: another server there would be taken for our router."""
    if not 0 < port < 65536:
        raise ConfigError("--port must be between 0 and 65535")
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0") from error


def _write_private(path: Path, state: State) -> None:
    """Whole or not at all, and never with the permissions of a file that was there before."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(state))
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the state file {path}: {error.strerror}") from error
