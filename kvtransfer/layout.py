"""How a KV pool is laid out, and the fingerprint two pools must share before tokens may move between them.

The pool is one array ``[num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`` in C order, so
that a block, over all layers, is one contiguous run of ``block_bytes``: one message per block. In key order
``dim_major`` (native CPU kernels) the keys of a head lie as ``[head_dim, block_size]`` in the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from kvtransfer.errors import LayoutError

WIRE_VERSION: Final = 5

TOKEN_MAJOR: Final = "token_major"  # noqa: S105 - no secret
DIM_MAJOR: Final = "dim_major"

ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class BlockLayout:
    """Shape of one block. ``block_size`` is in tokens; ``dtype`` is a torch dtype name without ``torch.``.

    ``key_order`` names the order of keys inside a block; pools that differ in it hold different bytes.
    Raises `LayoutError` for an unknown dtype or key order, or a size that is not positive.
    """

    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    key_order: str = TOKEN_MAJOR

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"unknown dtype {self.dtype!r}; one of {', '.join(ITEM_BYTES)}")
        if self.key_order not in (TOKEN_MAJOR, DIM_MAJOR):
            raise LayoutError(f"unknown key order {self.key_order!r}; {TOKEN_MAJOR} or {DIM_MAJOR}")
        for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) <= 0:
                raise LayoutError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: ``(num_layers, 2, num_kv_heads, block_size, head_dim)``."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the unit that moves."""
        return self.token_bytes * self.block_size

    def facts(self, weights_id: str, rope: str) -> dict[str, str]:
        """What two nodes must have in common, by a name that an operator knows.

        ``weights_id`` names the model's weights, ``rope`` its position encoding. The block size is not among them:
        `kvtransfer.regroup` cuts blocks of one size out of blocks of another.
        """
        return {
            "KV wire version": str(WIRE_VERSION),
            "KV dtype": self.dtype,
            "layers": str(self.num_layers),
            "KV heads": str(self.num_kv_heads),
            "head dim": str(self.head_dim),
            "key order": self.key_order,
            "weights": weights_id,
            "position encoding": rope,
        }

    def fingerprint(self, weights_id: str, rope: str) -> str:
        """Hex BLAKE2b-128 over :meth:`facts`: what must agree before tokens may be decoded from.

        Every part is length-prefixed, so that no two different lists of parts hash the same bytes.
        """
        digest = hashlib.blake2b(digest_size=16)
        for part in ("baton-kv", *self.facts(weights_id, rope).values()):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
        return digest.hexdigest()
