"""`python -m router`: the HTTP front and the dispatcher as one process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from cluster.api_keys import KeyRing, plain_key, read_keys
from cluster.config import ENV_API_KEY, ConfigError, add_cluster_arguments, api_key, cluster_config
from cluster.garbage import collect_seldom, permanent_objects
from cluster.model_store import ModelFilesError
from cluster.parent import exit_with_parent
from cluster.telemetry import setup_logging
from router.tool_formats import PARSER_NAMES

with permanent_objects():
    from router.service import RouterConfig, serve
    from router.workers import run_workers


def parser() -> argparse.ArgumentParser:
    """The router's options."""
    made = argparse.ArgumentParser(
        prog="python -m router",
        description="OpenAI-style HTTP endpoint in front of prefill and decode nodes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m router --model smollm2-135m --redis redis://127.0.0.1:6379/0 --port 8000",
    )
    made.add_argument("--model", required=True, help="as for the nodes; only its tokenizer and config are read")
    made.add_argument("--served-model-name", metavar="NAME", help="what clients ask for (default: from --model)")
    made.add_argument("--max-model-len", type=int, metavar="TOKENS", help="context limit (default: the model's)")
    made.add_argument(
        "--tool-call-parser",
        choices=PARSER_NAMES,
        default="auto",
        help="how the model writes calls of tools; auto: as its chat template does",
    )
    http = made.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    http.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any, see the log")
    http.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="router processes that share the port, to use several CPUs",
    )
    http.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a site whose pages may call this server from a browser, e.g. https://chat.example; may be repeated; "
        "'*' (any site) needs API keys",
    )
    access = made.add_argument_group("access")
    access.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help=f"TOML file of keys, see `baton keys new --help`; with it, or with ${ENV_API_KEY} (one key), every path "
        "but /health asks for a key",
    )
    access.add_argument(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="serve /metrics, /ready and /debug/router there, without a key; 0: any, see the log; with --workers, "
        "worker i uses PORT+i (default: no such port)",
    )
    access.add_argument("--admin-host", default="127.0.0.1", metavar="HOST", help="interface of --admin-port")
    made.add_argument("--share-of-limits", type=int, default=1, help=argparse.SUPPRESS)
    queue = made.add_argument_group("queue")
    queue.add_argument("--max-waiting", type=int, default=512, metavar="N", help="requests that may wait; then 429")
    queue.add_argument(
        "--max-wait-s", type=float, default=60.0, metavar="S", help="longest wait for capacity; then 429"
    )
    add_cluster_arguments(made, "router")
    return made


def main() -> int:
    """Run until SIGTERM; exit status 2 for settings that cannot work."""
    args = parser().parse_args()
    exit_with_parent()
    try:
        setup_logging(args.node_id or "router")
        _check(args)
        if args.workers > 1:
            return asyncio.run(run_workers(sys.argv[1:], args.workers, args.host, args.port, args.admin_port))
        config = RouterConfig(
            cluster=cluster_config(args, "router"),
            model=args.model,
            served_name=args.served_model_name,
            max_model_len=args.max_model_len,
            host=args.host,
            port=args.port,
            max_waiting=args.max_waiting,
            max_wait_s=args.max_wait_s,
            keys=_keys(args.api_keys),
            cors_origins=tuple(args.cors_origin),
            admin_host=args.admin_host,
            admin_port=args.admin_port,
            num_workers=args.share_of_limits,
            reuse_port=args.share_of_limits > 1,
            tool_call_parser=args.tool_call_parser,
        )
        if "*" in config.cors_origins and not config.keys:
            raise ConfigError("--cors-origin '*' without API keys lets any web page use this server; name the sites")
        collect_seldom()
        return uvloop.run(serve(config))
    except (ConfigError, ModelFilesError) as error:
        print(f"router: {error}", file=sys.stderr)  # noqa: T201 - for the person who started it
        return 2
    except KeyboardInterrupt:
        return 130


def _keys(path: Path | None) -> KeyRing:
    """From the file and the environment; neither: everybody may ask."""
    keys = [] if path is None else read_keys(path)
    if (own := api_key()) is not None:
        keys.append(plain_key("environment", own))
    return KeyRing(keys)


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 65536:
        raise ConfigError("--port must be between 0 and 65535")
    if args.admin_port is not None and not 0 <= args.admin_port < 65536 - max(args.workers, 1):
        raise ConfigError("--admin-port must be between 0 and 65535, with room for one port a worker")
    if not 1 <= args.workers <= 256:
        raise ConfigError("--workers must be between 1 and 256")
    if args.max_waiting < 1:
        raise ConfigError("--max-waiting must be at least 1")
    if not 0 < args.max_wait_s < float("inf"):
        raise ConfigError("--max-wait-s must be positive")
    if args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError("--max-model-len must be at least 1")


if __name__ == "__main__":
    sys.exit(main())
