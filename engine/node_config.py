"""A node's command line, frozen into one configuration. Imports nothing heavy: `--help` is instant."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Literal, get_args

from cluster.config import (
    ENV_REQUIRE_TRANSPORT,
    ClusterConfig,
    ConfigError,
    add_cluster_arguments,
    cluster_config,
    required_transport,
    set_default_environment,
)

# Exit status of a node that must start again under a new epoch (EX_TEMPFAIL).
RESTART = 75

_DTYPES = ("fp32", "bf16", "int8")
_BACKENDS = ("auto", "native", "reference", "triton")
_DEVICES = ("auto", "cpu", "cuda")
_TRANSPORTS = ("ucx", "nixl", "tcp")
_DEFAULT_TRANSPORTS = "ucx,tcp"
# As in kvtransfer.digest, which this file must not load.
KvDigest = Literal["off", "sampled", "full"]
# As in kvtransfer.routes, likewise.
TransportKind = Literal["rdma", "cuda", "shm", "tcp"]


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything a node is told.

    ``max_batch_tokens`` matters on prefill nodes, ``max_num_seqs`` and ``kv_digest`` on decode nodes.
    """

    cluster: ClusterConfig
    model: str
    dtype: str
    backend: str
    device: str
    block_size: int
    kv_blocks: int | None
    kv_memory_bytes: int
    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    transports: tuple[str, ...]
    require_transport: TransportKind | None
    kv_digest: KvDigest
    threads: int
    http_port: int


def node_parser(role: str, description: str) -> argparse.ArgumentParser:
    """The options of a prefill or decode node."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {role}_node",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=f"example: python -m {role}_node --model smollm2-135m --redis redis://127.0.0.1:6379/0",
    )
    parser.add_argument(
        "--model", required=True, help="'smollm2-135m', a Hugging Face directory with safetensors, or a hub id"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="fp32", help="weights; the KV cache is fp32 for fp32, else bf16"
    )
    parser.add_argument(
        "--backend",
        choices=_BACKENDS,
        default="auto",
        help="what computes; auto: triton on a GPU, else native if a C++ compiler works",
    )
    parser.add_argument(
        "--device",
        choices=_DEVICES,
        default="auto",
        help="where weights, KV pool and steps are; auto: cuda if torch finds a GPU. A pool on a GPU takes as much host"
        " memory again",
    )
    pool = parser.add_argument_group("KV cache")
    pool.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="tokens in a KV block")
    pool.add_argument("--kv-blocks", type=int, metavar="N", help="blocks in the pool (default: from --kv-memory-gb)")
    pool.add_argument("--kv-memory-gb", type=float, default=1.0, metavar="GB", help="size of the pool in GB")
    run = parser.add_argument_group("scheduling")
    run.add_argument(
        "--max-batch-tokens", type=int, default=512, metavar="TOKENS", help="token budget of one prefill step"
    )
    run.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="requests a node holds (decode) or interleaves (prefill)",
    )
    run.add_argument("--max-model-len", type=int, metavar="TOKENS", help="context limit (default: the model's)")
    run.add_argument("--threads", type=int, default=0, help="compute threads; 0: one per CPU this process may use")
    run.add_argument(
        "--cpus", metavar="LIST", help="pin the process to these CPUs, e.g. 0 or 0,1 (default: no pinning)"
    )
    _add_transfer_arguments(parser)
    parser.add_argument(
        "--http-port", type=int, default=0, metavar="PORT", help="for /health, /metrics and /debug/kv; 0: any"
    )
    add_cluster_arguments(parser, role)
    return parser


def _add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV transfer")
    group.add_argument(
        "--transport",
        default=_DEFAULT_TRANSPORTS,
        metavar="LIST",
        help="KV transports offered; a pair uses the best that both offer, best first: ucx, nixl (for RDMA; needs the"
        " extra nixl, excludes ucx), tcp",
    )
    group.add_argument(
        "--require-transport",
        choices=get_args(TransportKind),
        default=required_transport(),
        help="what a KV connection must come out on; any other is refused, with an error that says what it was."
        " rdma: InfiniBand or RoCE; cuda: GPU to GPU; shm: shared memory of one host. Without it"
        f" ${ENV_REQUIRE_TRANSPORT} counts, else the best there is is taken",
    )
    group.add_argument(
        "--kv-digest",
        choices=get_args(KvDigest),
        default="sampled",
        help="how KV blocks are checked on arrival: a decode node asks for it, prefill nodes do what they are asked",
    )


def node_config(args: argparse.Namespace, role: str) -> NodeConfig:
    """Check and freeze the options, pin the process and set the thread count. Raises :class:`ConfigError`.

    Must run before torch is imported: its thread pools take their size and CPUs from the process then.
    """
    for name in ("block_size", "max_batch_tokens", "max_num_seqs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if args.kv_blocks is not None and args.kv_blocks < 1:
        raise ConfigError("--kv-blocks must be at least 1")
    if args.kv_memory_gb <= 0:
        raise ConfigError("--kv-memory-gb must be positive")
    transports = tuple(part.strip() for part in args.transport.split(",") if part.strip())
    if not transports or any(name not in _TRANSPORTS for name in transports):
        raise ConfigError(f"--transport takes a list of {', '.join(_TRANSPORTS)}")
    if {"ucx", "nixl"} <= set(transports):
        raise ConfigError("--transport takes ucx or nixl, not both: each brings its own UCX into the process")
    if args.require_transport not in (None, *get_args(TransportKind)):
        # Choices are not checked for what comes from the environment.
        raise ConfigError(f"${ENV_REQUIRE_TRANSPORT} must be one of {', '.join(get_args(TransportKind))}")
    if args.cpus:
        _pin(args.cpus)
    threads = args.threads or len(os.sched_getaffinity(0))
    set_default_environment({"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"})
    return NodeConfig(
        cluster=cluster_config(args, role),
        model=args.model,
        dtype=args.dtype,
        backend=args.backend,
        device=args.device,
        block_size=args.block_size,
        kv_blocks=args.kv_blocks,
        kv_memory_bytes=int(args.kv_memory_gb * 1e9),
        max_batch_tokens=args.max_batch_tokens,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        transports=transports,
        require_transport=args.require_transport,
        kv_digest=args.kv_digest,
        threads=threads,
        http_port=args.http_port,
    )


def _pin(cpus: str) -> None:
    try:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    except (ValueError, OSError) as error:
        allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"--cpus {cpus} cannot be used; this process may use {allowed}") from error
