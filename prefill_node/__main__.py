"""`python -m prefill_node`: one prefill node as a process."""

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

DESCRIPTION = "Computes prompts in chunks and pushes their KV blocks to decode nodes."


def main() -> int:
    """Run until SIGTERM; exit status 2 for settings that cannot work."""
    args = node_parser("prefill", DESCRIPTION).parse_args()
    exit_with_parent()
    try:
        setup_logging(args.node_id or "prefill")
        config = node_config(args, "prefill")
    except ConfigError as error:
        print(f"prefill node: {error}", file=sys.stderr)  # noqa: T201 - before any log is of use
        return 2
    # Only now: torch sizes its thread pools from the environment and CPUs that node_config has just set.
    with permanent_objects():
        import_torch()
        from kvtransfer.vendor import leave
        from prefill_node.service import serve

    status = asyncio.run(serve(config))
    if status == RESTART:
        os.execv(sys.executable, [sys.executable, "-m", "prefill_node", *sys.argv[1:]])  # noqa: S606 - no shell, our own command line
    return leave(status)


if __name__ == "__main__":
    sys.exit(main())
