"""`baton bench`: what this machine can do and how near kernels, engine, KV transfer and router come to it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config import ConfigError

if TYPE_CHECKING:
    from cli.model import Subparsers

ROOT = Path(__file__).parent.parent
_WHAT = ("kernels", "engine", "transfer", "router")


def add_parser(commands: Subparsers) -> None:
    """Add `baton bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure kernels, engine, KV transfer or router against the machine's limits",
        description="Measure against this machine's limits; see `baton bench engine --help` for the options.",
        epilog="example: baton bench engine --json --runs 7",
    )
    parser.add_argument("what", choices=_WHAT, nargs="?")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="passed on")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark as a process of its own: it loads torch, which the command does not."""
    if args.what is None:
        print(f"usage: baton bench {{{','.join(_WHAT)}}} [--help] [--json] [--runs N] [--threads N] [--only TEXT]")
        return 2
    if not (ROOT / "bench" / f"{args.what}.py").is_file():
        raise ConfigError("the benchmarks are not installed here; run this from a checkout of the repository")
    return subprocess.run([sys.executable, "-m", f"bench.{args.what}", *args.options], cwd=ROOT, check=False).returncode
