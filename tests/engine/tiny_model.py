"""A Llama of 2 layers and 20 tokens: its configuration and random weights, by Hugging Face's names."""

from __future__ import annotations

import torch

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 20,
}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    named = {"model.embed_tokens.weight": torch.randn(20, 16), "model.norm.weight": torch.randn(16)}
    named["lm_head.weight"] = torch.randn(20, 16)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, size in {"q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 16}.items():
            named[f"{prefix}self_attn.{name}.weight"] = torch.randn(size, 16)
        named[prefix + "mlp.gate_proj.weight"] = torch.randn(24, 16)
        named[prefix + "mlp.up_proj.weight"] = torch.randn(24, 16)
        named[prefix + "mlp.down_proj.weight"] = torch.randn(16, 24)
        named[prefix + "input_layernorm.weight"] = torch.randn(16)
        named[prefix + "post_attention_layernorm.weight"] = torch.randn(16)
    return named
