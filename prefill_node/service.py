"""Puts a prefill node together."""

from __future__ import annotations

from engine.node_config import NodeConfig
from engine.service import NodeParts, serve_node
from prefill_node.admission import PrefillSettings
from prefill_node.scheduler import PrefillState


async def serve(config: NodeConfig) -> int:
    """Run until told to stop. Returns the process's exit status."""
    return await serve_node(config, "prefill", _build)


def _build(parts: NodeParts) -> PrefillState:
    settings = PrefillSettings(
        block_size=parts.config.block_size,
        num_blocks=parts.pool.num_blocks,
        max_batch_tokens=parts.config.max_batch_tokens,
        max_active=parts.config.max_num_seqs,
        max_model_len=parts.max_model_len,
        fingerprint=parts.fingerprint,
    )
    return PrefillState(parts.pool, settings)
