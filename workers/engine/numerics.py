"""Numerics classes: how a model's weights and activations are held. One is chosen at an engine's start. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.errors import ModelUnusable


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """A class that the native kernels run."""

    name: str
    layer_bits: int
    """of a weight: 4 (groups of 32, activations of 8 bits), 8 (a scale for each output, activations of 16) or 16"""
    head_bits: int
    """of the matrix that makes logits"""


THROUGHPUT = Numerics(name="throughput", layer_bits=8, head_bits=8)
LATENCY = Numerics(name="latency", layer_bits=4, head_bits=8)
BF16 = Numerics(name="bf16", layer_bits=16, head_bits=16)
"""what the others are measured against"""
EXACT = "exact"
"""plain torch, for machines where the kernels can't be built: weights of 10 bits, exact sums (see `exact`)"""
NATIVE = {numerics.name: numerics for numerics in (LATENCY, THROUGHPUT, BF16)}
"""by name, the fastest first"""
UNSET = ("", "sim")


def checked(name: str) -> str | None:
    """A class's name as it was set; None if it wasn't. ModelUnusable for a name of none."""
    if name in UNSET:
        return None
    if name != EXACT and name not in NATIVE:
        raise ModelUnusable(f"MILLSTREAM_NUMERICS is {name!r}; use one of {', '.join(NATIVE)} or {EXACT}")
    return name
