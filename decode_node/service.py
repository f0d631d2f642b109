"""Puts a decode node together."""

from __future__ import annotations

from decode_node.reservation import DecodeSettings
from decode_node.scheduler import DecodeState
from engine.node_config import NodeConfig
from engine.service import NodeParts, serve_node
from kvtransfer.ticket import new_ticket_id


async def serve(config: NodeConfig) -> int:
    """Run until told to stop. Returns the process's exit status."""
    return await serve_node(config, "decode", _build)


def _build(parts: NodeParts) -> DecodeState:
    settings = DecodeSettings(
        block_size=parts.config.block_size,
        num_blocks=parts.pool.num_blocks,
        max_num_seqs=parts.config.max_num_seqs,
        max_model_len=parts.max_model_len,
        fingerprint=parts.fingerprint,
    )
    return DecodeState(parts.pool, settings, parts.party, parts.plane.hello, new_ticket_id)
