"""What a forward pass asks of a device. `plain` answers in torch alone, `cuda` with kernels of its own.

Every answer must depend on a row (or, for attention, on a sequence) alone: not on what is computed beside it (R8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A linear layer: y = x · (values · scale)ᵀ + bias."""

    values: torch.Tensor
    """[outputs, inputs], in the activations' type, or int8"""
    scale: torch.Tensor | None = None
    """[outputs] float32, for int8"""
    bias: torch.Tensor | None = None
    """[outputs] float32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How a layer's projections are cut, on this rank."""

    queries: int
    keys: int
    size: int
    epsilon: float
    query_norm: torch.Tensor | None = None
    """[size], for models that normalise each head's queries and keys"""
    key_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Rotary embedding: cosine and sine of each position's angles, [positions, head size / 2] float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One layer's keys and values: [pages, PAGE_TOKENS, key heads, head size] each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A `Pass` on the device; int32 throughout."""

    decode: bool
    longest: int
    """rows of the longest sequence"""
    ids: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


class Kernels(Protocol):
    """Rows are [rows, width] in `dtype`, the residual stream [rows, hidden] in float32."""

    @property
    def name(self) -> str:
        """What the numbers depend on besides the weights; part of the numerics class."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def linear(self, rows: torch.Tensor, matrix: Matrix, *, wide: bool = False) -> torch.Tensor:
        """[rows, inputs] → [rows, outputs], in float32 if `wide`."""
        ...

    def norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add `delta` to the residual, in place; its rows divided by their root mean square, times `weight`."""
        ...

    def place(self, mixed: torch.Tensor, heads: Heads, turn: Turn, cache: Cache, batch: Batch) -> torch.Tensor:
        """Turn queries and keys by their positions, write keys and values to their cells; the queries, by heads."""
        ...

    def attend(self, queries: torch.Tensor, cache: Cache, batch: Batch) -> torch.Tensor:
        """Each query over its sequence up to itself; queries and result: [rows, heads, size]."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) · second half: [rows, 2 · inner] → [rows, inner]."""
        ...
