"""`python -m decode_node`: one decode node as a process."""

from __future__ import annotations

import sys

from engine.process import Serve, node_process

DESCRIPTION = "Receives prompts' KV blocks and streams the answers, one token of every request a step."


def main() -> int:
    """Run until SIGTERM; returns the exit status."""
    return node_process("decode", DESCRIPTION, _serve)


def _serve() -> Serve:
    from decode_node.service import serve

    return serve


if __name__ == "__main__":
    sys.exit(main())
