"""What can happen to blocks on their way, by name. Each takes the blocks in flight and damages the last one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from fake_kv import EMPTY, Flight

Damage = Callable[[deque[Flight]], None]


def flip(flying: deque[Flight]) -> None:
    content = flying[-1].content
    if content:
        content[len(content) // 2] += 1


def zero(flying: deque[Flight]) -> None:
    flying[-1].content[:] = [0] * len(flying[-1].content)


def truncate(flying: deque[Flight]) -> None:
    content = flying[-1].content
    content[1:] = [EMPTY] * (len(content) - 1)


def lose_the_bytes(flying: deque[Flight]) -> None:
    """The receiver's block keeps what it had from an earlier life."""
    flying[-1].content = []


def swap_contents(flying: deque[Flight]) -> None:
    if len(flying) > 1:
        flying[-1].content, flying[-2].content = flying[-2].content, flying[-1].content


def replace_whole(flying: deque[Flight]) -> None:
    """Another block, digest and all, in this one's place."""
    if len(flying) > 1:
        flying[-1].content, flying[-1].digest = list(flying[-2].content), flying[-2].digest


def take_from_another_life(flying: deque[Flight]) -> None:
    """Right bytes, but made for another life of the receiver's block."""
    flying[-1].handle = type(flying[-1].handle)(flying[-1].handle.block_id, flying[-1].handle.generation + 1)


def lose(flying: deque[Flight]) -> None:
    """The sender believes that it went out."""
    flying.pop()


def overtake(flying: deque[Flight]) -> None:
    flying.rotate(1)


def come_twice(flying: deque[Flight]) -> None:
    """The second time much later, perhaps when the block is somebody else's."""
    flying.append(replace(flying[0], content=list(flying[0].content)))


# What a link may do to whole blocks: no request need fail of it, except of a loss.
LINK_FAULTS: dict[str, Damage] = {fault.__name__: fault for fault in (lose, overtake, come_twice)}
DAMAGES: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (flip, zero, truncate, lose_the_bytes, swap_contents, replace_whole, take_from_another_life)
}
