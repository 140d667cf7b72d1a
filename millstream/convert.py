"""`python -m millstream.convert GGUF DIRECTORY`: a GGUF file → a model directory that the torch engine loads at once.

A process of its own: it needs transformers and a gigabyte of memory for half a minute, once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from workers.engine.weights import precompute

_ABOUT_THE_FILE = ("quantization_config", "_name_or_path")


def convert(gguf: Path, directory: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json with its chat template, and the engine's own weights."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    print("reading the tokenizer", flush=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)
    _split_digits(gguf, directory / "tokenizer.json")
    print("reading the weights", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dequantized(transformers)
    )
    _save(model, directory)
    print("preparing the weights for the engine", flush=True)
    precompute(directory)


def _split_digits(gguf: Path, path: Path) -> None:
    """SmolLM's tokens never join digits with what is beside them; transformers loses that on the way from a GGUF.

    Without it two spaces before a digit become other tokens than the model was trained on.
    """
    from gguf import GGUFReader

    kind = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if kind is None or kind.contents() != "smollm":
        return
    described = json.loads(path.read_text())
    parts = [{"type": "Digits", "individual_digits": True}, described["pre_tokenizer"]]
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    path.write_text(json.dumps(described, ensure_ascii=False))


def _dequantized(transformers: Any) -> dict[str, Any]:
    """From 5.24 on transformers keeps GGUF weights packed unless told otherwise; before, it always unpacks them."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _save(model: Any, directory: Path) -> None:
    """Not by save_pretrained, which refuses what came from a GGUF. float16 is more than four-bit weights need."""
    import torch
    from safetensors.torch import save_file

    config = {name: value for name, value in model.config.to_dict().items() if name not in _ABOUT_THE_FILE}
    config["dtype"] = "float16"
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = model.state_dict()
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    tensors = {name: tensor.to(torch.float16).contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
