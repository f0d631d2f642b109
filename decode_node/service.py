"""Puts a decode node together."""

from __future__ import annotations

import logging

from cluster.channel import ChannelError
from cluster.config import ConfigError
from cluster.model_store import ModelFilesError
from decode_node.reservation import DecodeSettings
from decode_node.scheduler import DecodeState
from engine.node import DeclaredDeadError
from engine.node_config import RESTART, NodeConfig
from engine.service import NodeParts, run_node
from kvtransfer.errors import KVTransferError
from kvtransfer.ticket import new_ticket_id

log = logging.getLogger(__name__)


async def serve(config: NodeConfig) -> int:
    """Run until told to stop. Returns the process's exit status."""
    try:
        await run_node(config, "decode", _build)
    except (ConfigError, ModelFilesError, ChannelError, KVTransferError, OSError) as error:
        log.error("cannot serve: %s", error)
        return 2
    except DeclaredDeadError as error:
        log.error("%s; starting again as another life", error)
        return RESTART
    return 0


def _build(parts: NodeParts) -> DecodeState:
    settings = DecodeSettings(
        block_size=parts.config.block_size,
        num_blocks=parts.pool.num_blocks,
        max_num_seqs=parts.config.max_num_seqs,
        max_model_len=parts.max_model_len,
        fingerprint=parts.fingerprint,
    )
    return DecodeState(parts.pool, settings, parts.party, parts.plane.hello, new_ticket_id)
