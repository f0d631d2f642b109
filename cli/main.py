"""The `baton` command."""

from __future__ import annotations

import argparse
import sys

from cli import bench, chat, keys, model, up
from cluster.config import ConfigError

EPILOG = """examples:
  baton model pull smollm2-135m      download and convert the demo model (once)
  baton up                           one prefill node, one decode node, a router, a private Redis
  baton up --prefill 2 --decode 2    two of each
  baton chat                         talk to what `baton up` serves
  baton keys new team-a              make an API key for `baton up --api-keys FILE`
  baton bench engine                 how near this machine's limits a step comes
"""


def build_parser() -> argparse.ArgumentParser:
    """All subcommands."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve large language models with separate pools for prefill and decode.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (up, chat, model, keys, bench):
        command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
