"""`python -m router`: the HTTP front and the dispatcher as one process."""

from __future__ import annotations

import argparse
import asyncio
import sys

from cluster.config import ConfigError, add_cluster_arguments, cluster_config
from cluster.model_store import ModelFilesError
from cluster.parent import exit_with_parent
from cluster.telemetry import setup_logging
from router.service import RouterConfig, serve


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
    http = made.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    http.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any, see the log")
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
        config = RouterConfig(
            cluster=cluster_config(args, "router"),
            model=args.model,
            served_name=args.served_model_name,
            max_model_len=args.max_model_len,
            host=args.host,
            port=args.port,
            max_waiting=args.max_waiting,
            max_wait_s=args.max_wait_s,
        )
        return asyncio.run(serve(config))
    except (ConfigError, ModelFilesError) as error:
        print(f"router: {error}", file=sys.stderr)  # noqa: T201 - for the person who started it
        return 2
    except KeyboardInterrupt:
        return 130


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 65536:
        raise ConfigError("--port must be between 0 and 65535")
    if args.max_waiting < 1:
        raise ConfigError("--max-waiting must be at least 1")
    if not 0 < args.max_wait_s < float("inf"):
        raise ConfigError("--max-wait-s must be positive")
    if args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError("--max-model-len must be at least 1")


if __name__ == "__main__":
    sys.exit(main())
