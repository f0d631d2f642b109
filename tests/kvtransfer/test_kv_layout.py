from __future__ import annotations

import dataclasses

import pytest

from kvtransfer.errors import LayoutError
from kvtransfer.layout import BlockLayout

LLAMA = BlockLayout("bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)


def test_sizes():
    assert LLAMA.token_bytes == 128 << 10
    assert LLAMA.block_bytes == 2 << 20
    assert dataclasses.replace(LLAMA, dtype="float32").token_bytes == 2 * LLAMA.token_bytes


def test_fingerprint_is_stable_and_sees_every_field_but_the_block_size():
    mine = LLAMA.fingerprint("weights", "rope")
    assert mine == LLAMA.fingerprint("weights", "rope")
    assert len(mine) == 32
    others = [
        dataclasses.replace(LLAMA, **{name: value}).fingerprint("weights", "rope")
        for name, value in (
            ("dtype", "float16"),
            ("num_layers", 31),
            ("num_kv_heads", 4),
            ("head_dim", 64),
            ("key_order", "dim_major"),
        )
    ]
    others += [LLAMA.fingerprint("weights2", "rope"), LLAMA.fingerprint("weights", "rope2")]
    # Parts do not run into each other.
    others += [LLAMA.fingerprint("weightsr", "ope"), LLAMA.fingerprint("", "weightsrope")]
    assert len({mine, *others}) == 10
    assert mine == dataclasses.replace(LLAMA, block_size=32).fingerprint("weights", "rope")


@pytest.mark.parametrize("change", [{"dtype": "int4"}, {"block_size": 0}, {"head_dim": -1}])
def test_impossible_layouts(change):
    with pytest.raises(LayoutError):
        dataclasses.replace(LLAMA, **change)
