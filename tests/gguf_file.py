"""A tiny GGUF file, made on the spot from the tiny model's tokenizer and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from engine_world import CONTROL, TEMPLATE, write_tokenizer

_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS = 2, 96, 192, 6, 2
_CONTROL_TOKEN, _NORMAL_TOKEN = 3, 1


def write_gguf(path: Path, scratch: Path, *, architecture: str = "llama", template: str | None = TEMPLATE) -> Path:
    """A model of 250,000 parameters; `scratch` gets its tokenizer."""
    import gguf

    write_tokenizer(scratch)
    described = json.loads((scratch / "tokenizer.json").read_text())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    file = gguf.GGUFWriter(path, architecture)
    file.add_name("tiny")
    file.add_context_length(512)
    file.add_embedding_length(_HIDDEN)
    file.add_block_count(_LAYERS)
    file.add_feed_forward_length(_INNER)
    file.add_head_count(_HEADS)
    file.add_head_count_kv(_KV_HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10_000.0)
    file.add_rope_dimension_count(_HIDDEN // _HEADS)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(tokens)
    file.add_token_types([_CONTROL_TOKEN if token in CONTROL else _NORMAL_TOKEN for token in tokens])
    file.add_token_merges(described["merges"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    if template is not None:
        file.add_chat_template(template)
    random = np.random.default_rng(0)
    for name, shape in _shapes(len(tokens)).items():
        norm = "norm" in name
        values = np.ones(shape) if norm else random.standard_normal(shape) / shape[-1] ** 0.5
        file.add_tensor(name, values.astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    shared = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, _HIDDEN), "output_norm.weight": (_HIDDEN,)}
    for index in range(_LAYERS):
        block = f"blk.{index}."
        shapes |= {
            f"{block}attn_norm.weight": (_HIDDEN,),
            f"{block}ffn_norm.weight": (_HIDDEN,),
            f"{block}attn_q.weight": (_HIDDEN, _HIDDEN),
            f"{block}attn_k.weight": (shared, _HIDDEN),
            f"{block}attn_v.weight": (shared, _HIDDEN),
            f"{block}attn_output.weight": (_HIDDEN, _HIDDEN),
            f"{block}ffn_gate.weight": (_INNER, _HIDDEN),
            f"{block}ffn_up.weight": (_INNER, _HIDDEN),
            f"{block}ffn_down.weight": (_HIDDEN, _INNER),
        }
    return shapes
