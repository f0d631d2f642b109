"""The prompt at the beginning of a completion's answer, and where log-probabilities say that tokens stand."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from cluster.errors import EngineError
from cluster.request import TokenLogprobs
from router.completion import Piece
from router.detokenizer import Detokenizer
from router.generation import Generation
from router.logprobs import TokenEntry


def echo_piece(
    text: str, generation: Generation, prompt_logprobs: tuple[TokenLogprobs, ...], detokenizer: Detokenizer
) -> Piece:
    """The prompt as the first piece of its choice.

    ``detokenizer`` is a fresh one that shows what ``text`` shows; it is used up. Raises :class:`EngineError` if the
    nodes did not answer for every prompt token but the first.
    """
    if generation.num_prompt_logprobs is None:
        return Piece(text, ())
    token_ids = generation.prompt_token_ids
    if len(prompt_logprobs) != len(token_ids) - 1:
        raise EngineError("The prompt's log-probabilities are not complete.")
    entries: list[TokenEntry] = []
    offset = 0
    for token_id, logprobs in zip(token_ids, (None, *prompt_logprobs), strict=True):
        entries.append(TokenEntry(token_id, offset, logprobs))
        offset += len(detokenizer.feed(token_id))
    return Piece(text, (), entries=tuple(entries))


def moved(piece: Piece, num_chars: int) -> Piece:
    """The piece with its offsets counted from so many characters earlier: those of the prompt."""
    if not piece.entries or not num_chars:
        return piece
    return msgspec.structs.replace(
        piece, entries=tuple(replace(entry, offset=entry.offset + num_chars) for entry in piece.entries)
    )
