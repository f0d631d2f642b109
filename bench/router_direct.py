"""A router's part of the conversation without a router: reserve, submit, read tokens."""

from __future__ import annotations

import time

from bench.router_client import NUM_TOKENS, PROMPT, Seen
from cluster.channel import Channel
from cluster.config import ClusterConfig, new_epoch
from cluster.membership import Membership
from cluster.request import RequestId, RequestKey, SamplingParams
from cluster.wire import Granted, Reserve, Submit, Token0, Tokens

_DEADLINE_S = 60.0


class Direct:
    """Talks to the nodes over a channel of its own; use as ``async with``."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._channel = Channel(ClusterConfig("bench-direct", new_epoch(), redis_url, "127.0.0.1", "127.0.0.1", None))
        self._count = 0

    async def __aenter__(self) -> Direct:
        await self._channel.__aenter__()
        membership = Membership(self._redis_url)
        self._nodes = {record.role: record.party for record in (await membership.read()).values()}
        await membership.close()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._channel.__aexit__(None, None, None)

    async def ask(self) -> Seen:
        """One request, token by token."""
        self._count += 1
        key = RequestKey(RequestId(f"direct-{self._count}"), 0)
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        asked_s, tokens_s = time.monotonic(), list[float]()
        reserve = Reserve(
            key=key,
            prefill=self._nodes["prefill"],
            prompt_len=len(PROMPT),
            block_hashes=(),
            seed_hash=bytes(16),
            sampling=sampling,
            deadline_s=_DEADLINE_S,
        )
        self._channel.send(self._nodes["decode"], reserve)
        while len(tokens_s) < NUM_TOKENS:
            match (await self._channel.receive()).body:
                case Granted(_key, ticket):
                    submit = Submit(
                        key=key,
                        prompt_token_ids=tuple(PROMPT),
                        block_hashes=(),
                        sampling=sampling,
                        ticket=ticket,
                        deadline_s=_DEADLINE_S,
                    )
                    self._channel.send(self._nodes["prefill"], submit)
                case Token0() | Tokens():
                    tokens_s.append(time.monotonic())
        return Seen(asked_s, tokens_s, b"")
