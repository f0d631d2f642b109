"""The smallest decode step that has what a graph can get wrong: it stores keys, and then attends to them."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.triton_cases import LAYER, PagedBatch
from kernels.triton.decode import DecodeWorkspace, paged_decode
from kernels.triton.graphs import DecodeInputs
from kernels.triton.store import store_kv


class OneLayerStep:
    """A model of one layer whose queries, keys and values are the token's own row of a random table.

    ``sizes`` lists the batch sizes it was called with.
    """

    def __init__(self, batch: PagedBatch) -> None:
        heads, pool = batch.heads, batch.pool
        count = len(batch.context_lens)
        width = heads.num_heads + 2 * heads.num_kv_heads
        self.heads, self.pool = heads, pool
        self.table = torch.randn(count + 1, width, heads.head_dim, device=pool.device).to(pool.dtype)
        context = batch.block_tables.shape[1] * pool.shape[4]
        self.workspace = DecodeWorkspace(count, heads.num_heads, heads.head_dim, context, pool.device)
        self.sizes: list[int] = []

    def __call__(self, inputs: DecodeInputs) -> Tensor:
        """Attention of each sequence's token: ``[num_sequences, num_heads, head_dim]``, zero for padding."""
        count = len(inputs.token_ids)
        self.sizes.append(count)
        heads = self.heads
        rows = self.table[inputs.token_ids]
        q, k, v = rows.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        store_kv(self.pool, LAYER, k, v, inputs.slots)
        index = torch.arange(count, dtype=torch.int32, device=self.pool.device)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        tables = inputs.block_tables
        paged_decode(q, self.pool, LAYER, index, inputs.context_lens, tables, self.workspace, out)
        return out


def inputs_of(batch: PagedBatch, sequences: list[int]) -> DecodeInputs:
    """The next step of these sequences of a batch: token ``sequence + 1`` goes to the last position of each."""
    block_size, device = batch.pool.shape[4], batch.pool.device
    lens, tables = batch.context_lens[sequences], batch.block_tables[sequences]
    positions = lens.long() - 1
    blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    slots = blocks * block_size + positions % block_size
    return DecodeInputs(torch.tensor(sequences, device=device) + 1, positions, slots, lens, tables)
