"""A model's weights as the kernels want them: quantised by class, packed, and kept on disk that way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.native.pack import BLOCK, GROUP, Packed, pack
from workers.engine.numerics import Numerics
from workers.engine.source import Matrix, digest_of, embedding, parts, tensors_of

_FORMAT = "1"
LINEARS = ("qkv", "output", "gate_up", "down")
_HEAD_STEP = 16
"""heads have a multiple of this many dimensions"""
_MOST_SHARED = 16
"""query heads that share a key head"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    """A whole model in one numerics class."""

    architecture: Architecture
    numerics: Numerics
    digest: str
    embedding: torch.Tensor
    """[vocab, hidden], in the precision of the source"""
    tensors: Mapping[str, torch.Tensor]
    """<linear>.weight, .scale, .bias, .heaviest; norms"""

    def bits(self, linear: str) -> int:
        return self.numerics.head_bits if linear == "head" else self.numerics.layer_bits


def keep(model_dir: Path, numerics: Numerics) -> None:
    """Write the packed weights next to the model's own, so that `load` need not make them again. ModelUnusable."""
    tensors = dict(_packed(model_dir, numerics))
    save_file(tensors, _path(model_dir, numerics), metadata={"format": _FORMAT, "digest": digest_of(tensors)})


def load(model_dir: Path, numerics: Numerics) -> PackedModel:
    """The weights of a model directory; packed now if that wasn't done before. ModelUnusable."""
    architecture = Architecture.read(model_dir)
    _check(architecture)
    tensors, digest = _kept(_path(model_dir, numerics))
    if not tensors:
        tensors = dict(_packed(model_dir, numerics))
        digest = digest_of(tensors)
    return PackedModel(
        architecture=architecture,
        numerics=numerics,
        digest=digest,
        embedding=embedding(model_dir),
        tensors=tensors,
    )


def _check(architecture: Architecture) -> None:
    inputs = (architecture.hidden, architecture.intermediate, architecture.heads * architecture.head_size)
    if any(count % GROUP for count in inputs):
        raise ModelUnusable(f"a model with layers of {inputs} inputs can't be run here; multiples of {GROUP} can")
    if architecture.head_size % _HEAD_STEP or architecture.heads > _MOST_SHARED * architecture.kv_heads:
        raise ModelUnusable(
            f"heads of {architecture.head_size} dimensions, {architecture.heads} for {architecture.kv_heads} of keys,"
            f" can't be run here; dimensions must be a multiple of {_HEAD_STEP}, and at most {_MOST_SHARED} heads share"
        )


def _path(model_dir: Path, numerics: Numerics) -> Path:
    return model_dir / f"engine-{numerics.name}.safetensors"


def _packed(model_dir: Path, numerics: Numerics) -> Iterator[tuple[str, torch.Tensor]]:
    for part in parts(model_dir):
        if not isinstance(part, Matrix):
            yield part.name, part.weight
            continue
        packed = pack(part.weight, numerics.head_bits if part.name == "head" else numerics.layer_bits)
        yield f"{part.name}.weight", packed.weight
        if packed.bits == 8:
            yield f"{part.name}.scale", packed.scale
            yield f"{part.name}.heaviest", heaviest(packed)
        if part.bias is not None:
            yield f"{part.name}.bias", F.pad(part.bias, (0, -len(part.bias) % BLOCK))


def heaviest(packed: Packed) -> torch.Tensor:
    """The largest norm of an output's whole numbers: what bounds the sums (linear.h)."""
    pairs = packed.weight.view(torch.int8).view(-1, packed.inputs // 2, 16, 2).double()
    return pairs.square().sum(dim=(1, 3)).max().sqrt().reshape(1)


def _kept(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """What `keep` wrote; nothing if it didn't, or another version of it did."""
    if not path.is_file():
        return {}, ""
    tensors, metadata = tensors_of(path)
    return (tensors, metadata["digest"]) if metadata.get("format") == _FORMAT else ({}, "")
