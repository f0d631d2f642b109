"""Blocks for a receiver whose blocks have another size: every token in its place, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.errors import LayoutError, LayoutMismatchError, PeerUnreachableError, TicketError
from kvtransfer.inproc import InprocRoad
from kvtransfer.layout import BlockLayout
from kvtransfer.regroup import Regrouper, TokenRun, run_of, source_blocks
from kvtransfer.ticket import TransferTicket

SIZES = [(16, 32), (32, 16), (16, 48), (48, 16), (5, 3), (3, 7), (1, 4), (4, 4)]
ORDERS = ["token_major", "dim_major"]
DTYPES = {"float32": np.uint32, "bfloat16": np.uint16, "uint8": np.uint8}
NUM_BLOCKS, NUM_TOKENS = 40, 90


def layout(block_size: int, key_order: str = "token_major", dtype: str = "bfloat16") -> BlockLayout:
    return BlockLayout(dtype, block_size, num_layers=3, num_kv_heads=2, head_dim=5, key_order=key_order)


class Tokens:
    """Keys and values of a sequence, ``[num_tokens, 3 layers, 2, 2 heads, 5]``, put into pools element by element."""

    def __init__(self, dtype: str) -> None:
        self.word = DTYPES[dtype]
        top = np.iinfo(self.word).max
        self.kv = np.random.default_rng(1).integers(1, top, (NUM_TOKENS, 3, 2, 2, 5), self.word, endpoint=True)

    def lay_out(self, pool: np.ndarray, shape: BlockLayout, table: list[int], tokens: range) -> None:
        words = pool.view(self.word).reshape(len(pool), *shape.block_shape)
        for token in tokens:
            block, slot = words[table[token // shape.block_size]], token % shape.block_size
            for layer, kind, head, dim in np.ndindex(3, 2, 2, 5):
                if kind == 0 and shape.key_order == "dim_major":
                    flat = block[layer, kind, head].reshape(-1)
                    flat[dim * shape.block_size + slot] = self.kv[token, layer, kind, head, dim]
                else:
                    block[layer, kind, head, slot, dim] = self.kv[token, layer, kind, head, dim]


def block_table(block_size: int, seed: int) -> list[int]:
    count = -(-NUM_TOKENS // block_size)
    return [int(block) for block in np.random.default_rng(seed).permutation(max(NUM_BLOCKS, count))[:count]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_order", ORDERS)
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_every_token_lands_in_its_slot(ours: int, theirs: int, key_order: str, dtype: str) -> None:
    mine, other = layout(ours, key_order, dtype), layout(theirs, key_order, dtype)
    tokens, table = Tokens(dtype), block_table(ours, 1)
    pool = np.full((max(table) + 1, mine.block_bytes), 0xEE, np.uint8)
    tokens.lay_out(pool, mine, table, range(NUM_TOKENS))
    regrouper = Regrouper(pool, mine)
    for start in range(0, NUM_TOKENS, theirs):
        covered = range(start, min(start + theirs, NUM_TOKENS))
        expected = np.zeros((1, other.block_bytes), np.uint8)
        tokens.lay_out(expected, other, [0] * NUM_TOKENS, covered)
        run = run_of(table, covered.start, covered.stop, ours)
        regrouper.check(run, other.block_bytes)
        assert np.array_equal(regrouper.gather(run, other.block_bytes), expected[0])


@pytest.mark.parametrize("scheme", ["inproc", "tcp", "ucx"])
@pytest.mark.parametrize("key_order", ORDERS)
@pytest.mark.parametrize(("ours", "theirs"), SIZES)
def test_a_prompts_suffix_arrives_chunk_by_chunk(nodes, scheme, key_order, ours, theirs) -> None:
    """Digests in full mode, generations, and nothing but the ticket's blocks is written."""
    mine, other = layout(ours, key_order, "float32"), layout(theirs, key_order, "float32")
    p, d = nodes(scheme, "P", num_blocks=96, layout=mine), nodes(scheme, "D", num_blocks=96, layout=other)
    tokens, our_table, their_table = Tokens("float32"), block_table(ours, 1), block_table(theirs, 2)
    tokens.lay_out(p.pool, mine, our_table, range(NUM_TOKENS))
    first, count = 1, len(their_table)
    ticket = d.grant(their_table[first:], sender=p)
    runs = [
        (i - first, run_of(our_table, i * theirs, min((i + 1) * theirs, NUM_TOKENS), ours)) for i in range(first, count)
    ]
    for chunk in (runs[:2], runs[2:]):
        p.plane.push(ticket, chunk)
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == set(range(count - first)))
    p.wait_for(lambda: p.sent(ticket.ticket_id) == set(range(count - first)))
    expected = np.zeros_like(d.pool)
    tokens.lay_out(expected, other, their_table, range(first * theirs, NUM_TOKENS))
    assert np.array_equal(d.pool, expected)
    d.plane.complete(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)
    assert p.plane.stats().bytes_sent == d.plane.stats().bytes_received == (count - first) * other.block_bytes


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])
def test_more_than_is_kept_ready(nodes, scheme) -> None:
    """A push of many big blocks: only some are put together ahead of their turn, all arrive."""
    mine = BlockLayout("float32", 16, num_layers=16, num_kv_heads=8, head_dim=64)
    other = BlockLayout("float32", 24, num_layers=16, num_kv_heads=8, head_dim=64)
    p = nodes(scheme, "P", num_blocks=36, layout=mine, seed=1)
    d = nodes(scheme, "D", num_blocks=24, layout=other)
    ticket = d.grant(range(24))
    runs = [run_of(range(36), i * 24, (i + 1) * 24, 16) for i in range(24)]
    p.plane.push(ticket, list(enumerate(runs)))
    d.wait_for(lambda: len(d.arrived(ticket.ticket_id)) == 24)
    whole = Regrouper(p.pool, mine)
    assert all(np.array_equal(d.pool[i], whole.gather(run, other.block_bytes)) for i, run in enumerate(runs))
    d.plane.complete(ticket.ticket_id)
    p.wait_for(lambda: len(p.sent(ticket.ticket_id)) == 24)
    p.plane.finish_push(ticket.ticket_id)


BAD_RUNS = [
    TokenRun((), 0, 4),
    TokenRun((0,), 0, 0),
    TokenRun((0,), 0, 5),
    TokenRun((0, 1), 0, 4),
    TokenRun((0,), 4, 1),
    TokenRun((0,), -1, 2),
    TokenRun((0, 1), 1, 7),
    TokenRun((99,), 0, 4),
    TokenRun((-1,), 0, 4),
]


@pytest.mark.parametrize("run", BAD_RUNS, ids=str)
def test_impossible_runs_queue_nothing(nodes, run) -> None:
    p, d = nodes("inproc", "P", layout=layout(4)), nodes("inproc", "D", layout=layout(6))
    ticket = d.grant([0, 1])
    with pytest.raises(TicketError):
        p.plane.push(ticket, [(0, TokenRun((0, 1), 0, 6)), (1, run)])
    assert p.plane.stats().open_pushes == 0
    assert not d.pool.any()
    d.plane.withdraw(ticket.ticket_id)


def test_what_cannot_be_cut_is_refused(nodes) -> None:
    d = nodes("inproc", "D", layout=layout(6))
    ticket = d.grant([0])
    run = [(0, TokenRun((0, 1), 0, 6))]
    for sender in (
        nodes("inproc", "no layout", block_bytes=layout(4).block_bytes),
        nodes("inproc", "other fingerprint", layout=layout(4), fingerprint="layout-b"),
    ):
        with pytest.raises(LayoutMismatchError):
            sender.plane.push(ticket, run)
    p = nodes("inproc", "P", layout=layout(4))
    with pytest.raises(LayoutMismatchError):
        p.plane.push(ticket, [(0, 0)])  # a whole block of ours is none of theirs
    odd = nodes("inproc", "odd", block_bytes=layout(1).block_bytes + 1).grant([0])
    with pytest.raises(LayoutMismatchError):
        p.plane.push(odd, run)
    with pytest.raises(LayoutError):
        Regrouper(p.pool, layout(5))
    d.plane.withdraw(ticket.ticket_id)


def test_a_road_that_sends_rows_of_the_pool_only_is_passed_over(nodes, monkeypatch) -> None:
    p, d = nodes(["inproc", "tcp"], "P", layout=layout(4)), nodes(["inproc", "tcp"], "D", layout=layout(6))
    monkeypatch.setattr(p.plane._roads["tcp"], "regroups", False)
    ticket: TransferTicket = d.grant([0])
    p.plane.push(ticket, [(0, TokenRun((0, 1), 0, 6))])
    d.wait_for(lambda: d.arrived(ticket.ticket_id) == {0})
    assert p.plane.stats().connections == 0, "inproc has none"
    d.plane.complete(ticket.ticket_id)
    p.plane.finish_push(ticket.ticket_id)
    monkeypatch.setattr(InprocRoad, "regroups", False)
    with pytest.raises(PeerUnreachableError):
        p.plane.push(d.grant([1]), [(0, TokenRun((0, 1), 0, 6))])


def test_blocks_that_are_read_are_listed_once() -> None:
    assert source_blocks([3, TokenRun((4, 3), 0, 6), TokenRun((9,), 1, 1), 4]) == [3, 4, 9]
