"""The prompt at the beginning of a completion's answer, and where log-probabilities say that tokens stand."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from cluster.errors import EngineError
from cluster.request import TokenLogprobs
from router.completion import Piece
from router.detokenizer import Detokenizer
from router.generation import Generation
from router.logprobs import PromptScores, TokenEntry


def echo_piece(
    text: str, generation: Generation, prompt_logprobs: tuple[TokenLogprobs, ...], detokenizer: Detokenizer
) -> Piece:
    """The prompt as the first piece of its choice.

    ``detokenizer`` is a fresh one that shows what ``text`` shows; it is used up. Raises :class:`EngineError` if the
    nodes did not answer for every prompt token but the first.
    """
    num_top = generation.sampling.num_logprobs
    if num_top is None:
        return Piece(text, ())
    token_ids = generation.prompt_token_ids
    _check_complete(generation, prompt_logprobs)
    entries: list[TokenEntry] = []
    offset = 0
    for token_id, logprobs in zip(token_ids, (None, *prompt_logprobs), strict=True):
        # The nodes may have been asked for more likeliest ones, to be shown elsewhere.
        shown = None if logprobs is None else msgspec.structs.replace(logprobs, top=logprobs.top[:num_top])
        entries.append(TokenEntry(token_id, offset, shown))
        offset += len(detokenizer.feed(token_id))
    return Piece(text, (), entries=tuple(entries))


def scores_piece(generation: Generation, prompt_logprobs: tuple[TokenLogprobs, ...], num_top: int) -> Piece:
    """``prompt_logprobs`` of a choice, which is no part of its text. Raises as :func:`echo_piece` does."""
    _check_complete(generation, prompt_logprobs)
    return Piece("", (), scores=PromptScores(generation.prompt_token_ids, prompt_logprobs, num_top))


def _check_complete(generation: Generation, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
    if len(prompt_logprobs) != len(generation.prompt_token_ids) - 1:
        raise EngineError("The prompt's log-probabilities are not complete.")


def moved(piece: Piece, num_chars: int) -> Piece:
    """The piece with its offsets counted from so many characters earlier: those of the prompt."""
    if not piece.entries or not num_chars:
        return piece
    return msgspec.structs.replace(
        piece, entries=tuple(replace(entry, offset=entry.offset + num_chars) for entry in piece.entries)
    )
