"""Puts a prefill node together."""

from __future__ import annotations

import logging

from cluster.channel import ChannelError
from cluster.config import ConfigError
from cluster.model_store import ModelFilesError
from engine.node import DeclaredDeadError
from engine.node_config import RESTART, NodeConfig
from engine.service import NodeParts, run_node
from kvtransfer.errors import KVTransferError
from prefill_node.admission import PrefillSettings
from prefill_node.scheduler import PrefillState

log = logging.getLogger(__name__)


async def serve(config: NodeConfig) -> int:
    """Run until told to stop. Returns the process's exit status."""
    try:
        await run_node(config, "prefill", _build)
    except (ConfigError, ModelFilesError, ChannelError, KVTransferError, OSError) as error:
        log.error("cannot serve: %s", error)
        return 2
    except DeclaredDeadError as error:
        log.error("%s; starting again as another life", error)
        return RESTART
    return 0


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
