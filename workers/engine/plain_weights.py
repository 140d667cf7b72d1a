"""A model's weights as the plain runner wants them: fused, quantised, and kept on disk that way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.engine.architecture import Architecture
from workers.engine.exact import Linear, quantise, reach_of
from workers.engine.source import Matrix, digest_of, embedding, parts, tensors_of

PRECOMPUTED = "engine.safetensors"
_FORMAT = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    attention_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
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


def keep(model_dir: Path) -> None:
    """Write the quantised weights next to the model's own, so that `load` need not make them again."""
    tensors = dict(_quantised(model_dir))
    save_file(tensors, model_dir / PRECOMPUTED, metadata={"format": _FORMAT, "digest": digest_of(tensors)})


def load(model_dir: Path) -> Weights:
    """The weights of a model directory; quantised now if that wasn't done before. ModelUnusable."""
    architecture = Architecture.read(model_dir)
    tensors, digest = _precomputed(model_dir)
    if not tensors:
        tensors = dict(_quantised(model_dir))
        digest = digest_of(tensors)
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
        query_norm=tensors.get(prefix + "query_norm"),
        key_norm=tensors.get(prefix + "key_norm"),
        qkv=_linear(tensors, prefix + "qkv"),
        output=_linear(tensors, prefix + "output"),
        mlp_norm=tensors[prefix + "mlp_norm"],
        gate_up=_linear(tensors, prefix + "gate_up"),
        down=_linear(tensors, prefix + "down"),
    )


def _quantised(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield "embedding", embedding(model_dir)
    for part in parts(model_dir):
        if isinstance(part, Matrix):
            yield from _named(part.name, quantise(part.weight))
            if part.bias is not None:
                yield f"{part.name}.bias", part.bias
        else:
            yield part.name, part.weight


def _named(name: str, pair: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    quantised, scale = pair
    yield f"{name}.weight", quantised
    yield f"{name}.scale", scale
    yield f"{name}.reach", torch.tensor([reach_of(quantised)], dtype=torch.float64)


def _precomputed(model_dir: Path) -> tuple[dict[str, torch.Tensor], str]:
    """What `precompute` wrote; nothing if it didn't, or another version of it did."""
    path = model_dir / PRECOMPUTED
    if not path.is_file():
        return {}, ""
    tensors, metadata = tensors_of(path)
    return (tensors, metadata["digest"]) if metadata.get("format") == _FORMAT else ({}, "")
