"""`python -m prefill_node`: one prefill node as a process."""

from __future__ import annotations

import sys

from engine.process import Serve, node_process

DESCRIPTION = "Computes prompts in chunks and pushes their KV blocks to decode nodes."


def main() -> int:
    """Run until SIGTERM; returns the exit status."""
    return node_process("prefill", DESCRIPTION, _serve)


def _serve() -> Serve:
    from prefill_node.service import serve

    return serve


if __name__ == "__main__":
    sys.exit(main())
