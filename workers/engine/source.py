"""A model's own weights, as its directory holds them, with the projections that share an input fused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {
    "attention_norm": "input_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm's weights, float32."""

    name: str
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer, float32: weight [outputs, inputs]."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None = None


def embedding(model_dir: Path) -> torch.Tensor:
    """[vocab, hidden], in the precision of the source. ModelUnusable."""
    return _reader(model_dir)[_EMBEDDING]()


def parts(model_dir: Path) -> Iterator[Vector | Matrix]:
    """All but the embedding: head, final_norm, and for each layer layers.<n>.<norm or linear layer>. ModelUnusable."""
    source = _reader(model_dir)
    try:
        yield Matrix("head", source[_HEAD if _HEAD in source else _EMBEDDING]().float())
        yield Vector("final_norm", source["model.norm.weight"]().float())
        for index in range(Architecture.read(model_dir).layers):
            yield from _layer(source, f"model.layers.{index}.", f"layers.{index}.")
    except KeyError as exc:
        raise ModelUnusable(f"{model_dir} has no tensor {exc}") from exc


def tensors_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A whole safetensors file, and its metadata. ModelUnusable."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Eight characters that tell these numbers from others."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


_Source = Mapping[str, Callable[[], torch.Tensor]]


def _layer(source: _Source, theirs: str, ours: str) -> Iterator[Vector | Matrix]:
    for name, norm in _NORMS.items():
        if name in ("attention_norm", "mlp_norm") or theirs + norm in source:
            yield Vector(ours + name, source[theirs + norm]().float())
    for name, fused in _FUSED.items():
        weight = torch.cat([source[f"{theirs}{part}.weight"]().float() for part in fused])
        biases = [source[key]().float() for part in fused if (key := f"{theirs}{part}.bias") in source]
        yield Matrix(ours + name, weight, torch.cat(biases) if biases else None)


def _reader(model_dir: Path) -> _Source:
    """How to read each tensor of the model's own files."""
    index = model_dir / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else None
    source: dict[str, Callable[[], torch.Tensor]] = {}
    for path in [model_dir / name for name in names or ["model.safetensors"]]:
        with _opened(path) as file:
            source |= {name: _read(path, name) for name in file.keys()}  # noqa: SIM118
    return source


def _read(path: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with _opened(path) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return read


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as exc:
        raise ModelUnusable(
            f"{path} is missing or broken; delete the directory, and `millstream up` makes it again"
        ) from exc
