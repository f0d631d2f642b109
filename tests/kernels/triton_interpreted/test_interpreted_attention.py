"""Paged attention in the interpreter: against the reference, and against itself in other company."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from bench import triton_cases as cases
from bench.triton_cases import Heads, paged_batch
from kernels.triton import decode
from kernels.triton.decode import SPLIT_TOKENS, DecodeWorkspace

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Multi-query, grouped and multi-head; groups that are no power of two; a head narrower than a tensor core takes.
HEADS = [
    Heads(4, 1, 64),
    Heads(6, 2, 64),
    Heads(2, 2, 64),
    Heads(3, 1, 128),
    Heads(4, 2, 128),
    Heads(2, 2, 128),
    Heads(3, 1, 4),
]
# (rows, context): whole prompts, chunks after a past, single rows, a context that ends with a tile and with a split.
CHUNKS = [(5, 5), (1, 1), (1, 40), (7, 39), (33, 70), (2, 64), (1, SPLIT_TOKENS), (1, SPLIT_TOKENS + 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_paged_attention(dtype: torch.dtype, heads: Heads) -> None:
    comparisons = cases.attention(heads, dtype, CHUNKS, block_size=16)
    assert [one for one in comparisons if not one.good] == []


@pytest.mark.parametrize("block_size", [1, 5, 128])
def test_any_block_size(block_size: int) -> None:
    comparisons = cases.attention(Heads(2, 1, 64), torch.float32, [(3, 3), (2, 130)], block_size)
    assert [one for one in comparisons if not one.good] == []


def test_more_heads_on_a_kv_head_than_one_program_takes() -> None:
    comparisons = cases.attention(Heads(35, 1, 64), torch.float32, [(3, 20)], block_size=16)
    assert [one for one in comparisons if not one.good] == []


def test_a_prompt_row_does_not_depend_on_its_chunk_or_its_batch() -> None:
    """To rounding only: the interpreter's `tl.dot` is numpy's BLAS, and some of its kernels (on AMD's CPUs without
    AVX-512 for one) round a row by its place in the tile, which a tensor core does not.
    """
    batch = paged_batch(Heads(6, 2, 64), torch.float32, [(4, 9), (75, 75)], block_size=16)
    whole = batch.prefill()[4:]
    for cuts in ([0, 1, 2, 31, 32, 75], [0, 64, 75]):
        for start, end in itertools.pairwise(cuts):
            torch.testing.assert_close(batch.part(1, start, end).prefill(), whole[start:end], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("programs", [1, 2, 64])
def test_a_decode_row_does_not_depend_on_its_batch(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many programs share its splits, nor on the room there is for more."""
    lengths = [600, 1, 2 * SPLIT_TOKENS]
    batch = paged_batch(Heads(4, 2, 64), torch.float32, [(1, length) for length in lengths], block_size=16)
    together = batch.decode()
    monkeypatch.setattr(decode, "_PROGRAMS", programs)
    assert torch.equal(batch.decode(), together)
    workspace = DecodeWorkspace(2, 4, 64, 5000, "cpu")
    for row in range(len(lengths)):
        assert torch.equal(batch.part(row, 0, 1).decode(workspace)[0], together[row])


def test_padding_and_rows_of_no_sequence_are_left_alone() -> None:
    batch = paged_batch(Heads(2, 1, 64), torch.float32, [(1, 20), (3, 30), (1, 5)], block_size=16)
    padded = replace(batch, context_lens=torch.tensor([20, 0, 5], dtype=torch.int32))
    out = padded.decode()
    assert out[1:4].isnan().all()
    assert torch.equal(out[[0, 4]], batch.decode()[[0, 4]])
