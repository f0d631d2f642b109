"""Log-probabilities as OpenAI's two endpoints write them, each token under its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster.request import TokenLogprobs
from router.replies import ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of an answer. ``offset`` is where its text begins, in characters of the choice's own text.

    ``logprobs`` is None for the first token of a prompt only: nothing comes before it.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A prompt's tokens and, of each but the first, what the nodes found: of the ``num_top`` likeliest at least."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    num_top: int


class TokenNames(Protocol):
    """What a token is called."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for; a special token's are those of its text."""
        ...


def completion_logprobs(entries: Iterable[TokenEntry], names: TokenNames) -> CompletionLogprobs:
    """The form of ``/v1/completions``: the sampled token is always in the dictionary, in addition if need be."""
    found = CompletionLogprobs([], [], [], [])
    for entry in entries:
        name = legacy_name(names.token_bytes(entry.token_id))
        found.tokens.append(name)
        found.text_offset.append(entry.offset)
        if entry.logprobs is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in entry.logprobs.top:
            top.setdefault(legacy_name(names.token_bytes(token_id)), logprob)  # of equal names the likelier
        # Of all entries the sampled token's must not be lost to another of the same name.
        if top.get(name, entry.logprobs.chosen) != entry.logprobs.chosen:
            del top[name]
        top.setdefault(name, entry.logprobs.chosen)
        found.token_logprobs.append(entry.logprobs.chosen)
        found.top_logprobs.append(top)
    return found


def chat_logprobs(entries: Iterable[TokenEntry], names: TokenNames) -> ChatLogprobs:
    """The form of ``/v1/chat/completions``: exactly the likeliest tokens that were asked for."""
    content: list[TokenLogprob] = []
    for entry in entries:
        if entry.logprobs is not None:
            text, token = _text_and_bytes(names, entry.token_id)
            top = [
                TopLogprob(name, logprob, found)
                for token_id, logprob in entry.logprobs.top
                for name, found in (_text_and_bytes(names, token_id),)
            ]
            content.append(TokenLogprob(text, entry.logprobs.chosen, token, top))
    return ChatLogprobs(content)


def prompt_logprobs(scores: PromptScores, names: TokenNames) -> PromptLogprobs:
    """vLLM's: by token id, the prompt's token and the likeliest ones at its place; null for the first token."""
    found: PromptLogprobs = [None]
    for token_id, logprobs in zip(scores.token_ids[1:], scores.logprobs, strict=True):
        ranked = {token_id: (logprobs.chosen, logprobs.rank)}
        ranked |= {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(logprobs.top[: scores.num_top], 1)}
        found.append(
            {
                str(one): PromptLogprob(logprob, rank, _text_and_bytes(names, one)[0])
                for one, (logprob, rank) in ranked.items()
            }
        )
    return found


def legacy_name(token: bytes) -> str:
    """A token's text, or ``bytes:\\xe6\\x9d`` (OpenAI's own way) if its bytes alone are no text."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _text_and_bytes(names: TokenNames, token_id: int) -> tuple[str, list[int]]:
    token = names.token_bytes(token_id)
    return token.decode("utf-8", "replace"), list(token)
