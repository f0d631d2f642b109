"""A node as a process: its command line, its environment, its imports in the right order, its end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine

from cluster.config import ConfigError
from cluster.garbage import permanent_objects
from cluster.membership import Role
from cluster.parent import exit_with_parent
from cluster.telemetry import setup_logging
from engine.node_config import RESTART, NodeConfig, node_config, node_parser
from engine.quick_torch import import_torch

Serve = Callable[[NodeConfig], Coroutine[None, None, int]]


def node_process(role: Role, description: str, load: Callable[[], Serve]) -> int:
    """Run until SIGTERM; exit status 2 for settings that cannot work. ``load`` imports what serves and returns it."""
    args = node_parser(role, description).parse_args()
    exit_with_parent()
    try:
        setup_logging(args.node_id or role)
        config = node_config(args, role)
    except ConfigError as error:
        print(f"{role} node: {error}", file=sys.stderr)  # noqa: T201 - before any log is of use
        return 2
    # Only now: torch sizes its thread pools from the environment and CPUs that node_config has just set.
    with permanent_objects():
        import_torch()
        serve = load()
        from kvtransfer.vendor import leave

    status = asyncio.run(serve(config))
    if status == RESTART:
        command = [sys.executable, "-m", f"{role}_node", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - no shell, our own command line
    return leave(status)
