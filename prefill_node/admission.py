"""Whether a submitted request can run on this prefill node at all. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import BatonError, ContextLengthError, NodeStateError, TransferError
from cluster.wire import Submit, Ticket
from kvtransfer.errors import KVTransferError
from kvtransfer.ticket import TransferTicket, decode_ticket


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """``max_batch_tokens`` is the token budget of one step; ``max_active`` bounds the prompts that interleave."""

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_active: int
    max_model_len: int
    fingerprint: str


def check_submit(submit: Submit, settings: PrefillSettings) -> BatonError | None:
    """Why ``submit`` can never run here, or None."""
    prompt_len, size = len(submit.prompt_token_ids), settings.block_size
    num_blocks = -(-prompt_len // size)
    if submit.num_emitted and submit.sampling.num_choices > 1:
        return NodeStateError("several choices cannot go on from the tokens of one")
    max_prompt_len = settings.max_model_len - (0 if submit.sampling.prefill_only else 1)
    if not 0 < prompt_len <= max_prompt_len or len(submit.block_hashes) != prompt_len // size:
        return ContextLengthError("the prompt does not fit the model's context")
    if num_blocks > settings.num_blocks:
        return ContextLengthError("the prompt needs more KV blocks than the prefill node has")
    ticket = submit.ticket
    if (ticket is None) != submit.sampling.prefill_only:
        return NodeStateError("a ticket is for requests that generate something, and for these only")
    return None if ticket is None else _check_ticket(ticket, prompt_len, settings)


def _check_ticket(ticket: Ticket, prompt_len: int, settings: PrefillSettings) -> BatonError | None:
    if ticket.fingerprint != settings.fingerprint:
        return NodeStateError("the prefill and decode node serve different models or KV layouts")
    first, theirs = ticket.first_missing_token, ticket.block_size
    if (
        first % theirs
        or not 0 <= first <= prompt_len
        or ticket.num_blocks != -(-prompt_len // theirs) - first // theirs
    ):
        return NodeStateError("the ticket does not cover the prompt")
    return None


def open_ticket(submit: Submit) -> TransferTicket | None:
    """The transfer part of the ticket, or None if no block is missing. Raises :class:`TransferError`.

    It must lead to the very node the ticket names: that one's death ends the push.
    """
    ticket = submit.ticket
    if ticket is None or not ticket.num_blocks:
        return None
    try:
        transfer = decode_ticket(ticket.transfer)
    except KVTransferError as error:
        raise TransferError("the decode node's ticket cannot be read") from error
    if len(transfer.handles) != ticket.num_blocks:
        raise TransferError("the ticket's handles do not match its size")
    decode = ticket.decode
    if (transfer.hello.node_id, transfer.hello.epoch) != (decode.id, decode.epoch):
        raise TransferError("the ticket leads to another node than the one that granted it")
    return transfer
