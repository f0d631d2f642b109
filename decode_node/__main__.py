"""`python -m decode_node`: one decode node as a process."""

from __future__ import annotations

import asyncio
import os
import sys

from cluster.config import ConfigError
from cluster.garbage import permanent_objects
from cluster.parent import exit_with_parent
from cluster.telemetry import setup_logging
from engine.node_config import RESTART, node_config, node_parser
from engine.quick_torch import import_torch

DESCRIPTION = "Receives prompts' KV blocks and streams the answers, one token of every request a step."


def main() -> int:
    """Run until SIGTERM; exit status 2 for settings that cannot work."""
    args = node_parser("decode", DESCRIPTION).parse_args()
    exit_with_parent()
    try:
        setup_logging(args.node_id or "decode")
        config = node_config(args, "decode")
    except ConfigError as error:
        print(f"decode node: {error}", file=sys.stderr)  # noqa: T201 - before any log is of use
        return 2
    # Only now: torch sizes its thread pools from the environment and CPUs that node_config has just set.
    with permanent_objects():
        import_torch()
        from decode_node.service import serve
        from kvtransfer.vendor import leave

    status = asyncio.run(serve(config))
    if status == RESTART:
        os.execv(sys.executable, [sys.executable, "-m", "decode_node", *sys.argv[1:]])  # noqa: S606 - no shell, our own command line
    return leave(status)


if __name__ == "__main__":
    sys.exit(main())
