"""A model's weights as the runner wants them: fused, quantised, and kept on disk that way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.exact import Linear, quantise, reach_of

PRECOMPUTED = "engine.safetensors"
_FORMAT = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model."""

    architecture: Architecture
    digest: str
    embedding: torch.Tensor
    """[vocab, hidden], in the precision of the source"""
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Linear


def precompute(model_dir: Path) -> None:
    """Write the quantised weights next to the model's own, so that `load` need not make them again."""
    tensors = dict(_quantised(model_dir))
    save_file(tensors, model_dir / PRECOMPUTED, metadata={"format": _FORMAT, "digest": _digest(tensors)})


def load(model_dir: Path) -> Weights:
    """The weights of a model directory; quantised now if that wasn't done before. ModelUnusable."""
    architecture = Architecture.read(model_dir)
    tensors, digest = _precomputed(model_dir)
    if not tensors:
        tensors = dict(_quantised(model_dir))
        digest = _digest(tensors)
    return Weights(
        architecture=architecture,
        digest=digest,
        embedding=tensors["embedding"],
        layers=tuple(_layer(tensors, f"layers.{index}.") for index in range(architecture.layers)),
        final_norm=tensors["final_norm"],
        head=_linear(tensors, "head"),
    )


def _linear(tensors: Mapping[str, torch.Tensor], name: str) -> Linear:
    return Linear(
        tensors[f"{name}.weight"],
        tensors[f"{name}.scale"],
        tensors[f"{name}.reach"].item(),
        tensors.get(f"{name}.bias"),
    )


def _layer(tensors: Mapping[str, torch.Tensor], prefix: str) -> Layer:
    return Layer(
        attention_norm=tensors[prefix + "attention_norm"],
        qkv=_linear(tensors, prefix + "qkv"),
        output=_linear(tensors, prefix + "output"),
        mlp_norm=tensors[prefix + "mlp_norm"],
        gate_up=_linear(tensors, prefix + "gate_up"),
        down=_linear(tensors, prefix + "down"),
    )


_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {"attention_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}


def _quantised(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    source = _read(model_dir)
    architecture = Architecture.read(model_dir)
    embedding = source["model.embed_tokens.weight"]
    yield "embedding", embedding
    yield from _named("head", quantise(source.get("lm_head.weight", embedding).float()))
    yield "final_norm", source["model.norm.weight"].float()
    for index in range(architecture.layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        for name, norm in _NORMS.items():
            yield ours + name, source[theirs + norm].float()
        for name, parts in _FUSED.items():
            yield from _named(
                ours + name, quantise(torch.cat([source[f"{theirs}{part}.weight"].float() for part in parts]))
            )
            biases = [source[key].float() for part in parts if (key := f"{theirs}{part}.bias") in source]
            if biases:
                yield f"{ours}{name}.bias", torch.cat(biases)


def _named(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    quantised, scale = pair
    yield f"{name}.weight", quantised
    yield f"{name}.scale", scale
    yield f"{name}.reach", torch.tensor([reach_of(quantised)], dtype=torch.float64)


def _read(model_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model's own files."""
    index = model_dir / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else None
    tensors: dict[str, torch.Tensor] = {}
    for name in names or ["model.safetensors"]:
        tensors.update(_tensors(model_dir / name)[0])
    return tensors


def _precomputed(model_dir: Path) -> tuple[dict[str, torch.Tensor], str]:
    """What `precompute` wrote; nothing if it didn't, or another version of it did."""
    path = model_dir / PRECOMPUTED
    if not path.is_file():
        return {}, ""
    tensors, metadata = _tensors(path)
    return (tensors, metadata["digest"]) if metadata.get("format") == _FORMAT else ({}, "")


def _tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as exc:
        raise ModelUnusable(
            f"{path} is missing or broken; delete the directory, and `millstream up` makes it again"
        ) from exc


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]
