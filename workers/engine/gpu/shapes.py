"""Models of well-known shapes with random weights, for measuring where no model can be had."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, int | bool]] = {
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "smollm2": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


def write(directory: Path, shape: str, device: torch.device) -> None:
    """A model directory without a tokenizer: config and weights, bf16, made on `device`."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "attention_bias": False,
        **SHAPES[shape],
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, size in _sizes(SHAPES[shape]).items():
        if len(size) == 1:
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            made = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
            tensors[name] = (made * size[-1] ** -0.5).cpu()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _sizes(shape: dict[str, int | bool]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, shared = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape["tie_word_embeddings"]:
        sizes["lm_head.weight"] = (shape["vocab_size"], hidden)
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        sizes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (query, hidden),
            f"{layer}self_attn.k_proj.weight": (shared, hidden),
            f"{layer}self_attn.v_proj.weight": (shared, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, query),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
        }
    return sizes
