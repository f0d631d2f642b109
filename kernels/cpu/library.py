"""The native kernels' C interface, declared for ctypes: functions and structures, field by field as in the sources."""

from __future__ import annotations

from ctypes import CDLL, Structure, c_float, c_int, c_int64, c_long, c_void_p
from pathlib import Path
from typing import Final

_LONG, _POINTER, _INT, _FLOAT = c_long, c_void_p, c_int, c_float
_SIGNATURES: Final = {
    "baton_linear": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _LONG, _INT, _INT),
    "baton_pack": (_POINTER, _INT, _LONG, _LONG, _POINTER, _LONG, _INT, _INT),
    "baton_pack_values": (_POINTER, _LONG, _POINTER, _LONG, _INT),
    "baton_embed": (_POINTER, _LONG, _POINTER, _INT, _LONG, _POINTER),
    "baton_rms_norm": (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _INT),
    "baton_exp_sums": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "baton_rope_store": (
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT),
        *(_POINTER, _INT, _LONG, _LONG, _LONG, _POINTER, _INT),
    ),
    "baton_attention": (
        *(_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _INT, _LONG, _LONG),
        *(_POINTER, _POINTER, _LONG, _FLOAT, _INT),
    ),
    "baton_layers": (_POINTER, _POINTER, _LONG, _INT),
    "baton_read": (_POINTER, _LONG, _INT),
    "baton_multiply_add": (_LONG, _FLOAT, _INT),
}


class Weight(Structure):
    """``struct Weight`` of linear.cpp."""

    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("next", c_void_p),
        ("num_outputs", c_long),
        ("num_inputs", c_long),
        ("kind", c_int),
        ("gate_up", c_int),
    )


class Layer(Structure):
    """``struct DecoderLayer`` of decoder.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        ("rope", c_int64),
    )


class Step(Structure):
    """``struct DecoderStep`` of decoder.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "hidden", "qkv", "attended", "inner")),
        *((name, c_void_p) for name in ("positions", "slots", "cos", "sin", "pool", "block_ids", "items")),
        *((name, c_long) for name in ("num_rows", "num_items", "hidden_size", "inner_size")),
        *((name, c_long) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, c_long) for name in ("kind", "block_size", "block_stride", "layer_stride")),
        ("eps", c_float),
        ("scale", c_float),
    )


def load_library(path: Path) -> CDLL:
    """Load a built library and declare its functions. Raises OSError."""
    library = CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    for name in ("baton_read", "baton_multiply_add"):
        getattr(library, name).restype = c_float
    return library
