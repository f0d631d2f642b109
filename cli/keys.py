"""`baton keys`: make API keys for a router."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from cluster.api_keys import KEY_NAME, digest_of, new_key
from cluster.config import ENV_API_KEY, ConfigError

if TYPE_CHECKING:
    from cli.model import Subparsers

DESCRIPTION = f"""Make an API key. The key goes to its holder, the [[key]] table into the file that the router reads
with --api-keys; only the table is kept, the key cannot be read from it.

Fields of a table: name; sha256; requests_per_minute and max_concurrent (default: no limit); cache_salt (default: the
name; holders with the same one share prefix caches). A single key without a file: ${ENV_API_KEY}."""


def add_parser(commands: Subparsers) -> None:
    """Add `baton keys new NAME`."""
    keys = commands.add_parser("keys", help="make API keys")
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    new = actions.add_parser(
        "new",
        help="make a key",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: baton keys new team-a --requests-per-minute 600 >> keys.toml",
    )
    new.add_argument("name", help="whose key it is: up to 64 letters, digits, dots, dashes and underscores")
    new.add_argument("--requests-per-minute", type=int, metavar="N")
    new.add_argument("--max-concurrent", type=int, metavar="N")
    new.set_defaults(run=run_new)


def run_new(args: argparse.Namespace) -> int:
    """The table on stdout, the key on stderr: `>> keys.toml` keeps the one and shows the other."""
    if not KEY_NAME.fullmatch(args.name):
        raise ConfigError("a key's name takes up to 64 letters, digits, dots, dashes and underscores")
    key = new_key()
    print(f'[[key]]\nname = "{args.name}"\nsha256 = "{digest_of(key.encode()).hex()}"')
    for field in ("requests_per_minute", "max_concurrent"):
        if (value := getattr(args, field)) is not None:
            print(f"{field} = {value}")
    print(f"{args.name}: {key}", file=sys.stderr)
    return 0
