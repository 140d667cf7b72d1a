"""The kernels in plain torch, one row or sequence at a time: slow, and the reference for those that are fast."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from workers.engine.gpu.kernels import Batch, Cache, Heads, Matrix, Turn
from workers.engine.gpu.pages import pages_of


class PlainKernels:
    """Implements `workers.engine.gpu.kernels.Kernels` on any device."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    @property
    def name(self) -> str:
        return f"plain{torch.finfo(self.dtype).bits}"

    def linear(self, rows: torch.Tensor, matrix: Matrix, *, wide: bool = False) -> torch.Tensor:
        weight = matrix.values.to(self.dtype)
        # a product of its own for each row, aligned alike: a library may add in another order for several at once
        out = torch.stack([torch.mv(weight, row.clone()) for row in rows]).float()
        if matrix.scale is not None:
            out *= matrix.scale
        if matrix.bias is not None:
            out += matrix.bias
        return out if wide else out.to(self.dtype)

    def norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        if delta is not None:
            residual += delta
        return _normed(residual, weight, epsilon).to(self.dtype)

    def place(self, mixed: torch.Tensor, heads: Heads, turn: Turn, cache: Cache, batch: Batch) -> torch.Tensor:
        queries, keys, values = torch.split(
            mixed.view(len(mixed), -1, heads.size), [heads.queries, heads.keys, heads.keys], dim=1
        )
        if heads.query_norm is not None and heads.key_norm is not None:
            queries = _normed(queries.float(), heads.query_norm, heads.epsilon)
            keys = _normed(keys.float(), heads.key_norm, heads.epsilon)
        cells, positions = batch.cells.long(), batch.positions.long()
        angles = turn.cos[positions, None], turn.sin[positions, None]
        cache.keys.flatten(0, 1)[cells] = _rotated(keys, *angles).to(self.dtype)
        cache.values.flatten(0, 1)[cells] = values
        return _rotated(queries, *angles).to(self.dtype)

    def attend(self, queries: torch.Tensor, cache: Cache, batch: Batch) -> torch.Tensor:
        begins, mixed = batch.begins.tolist(), []
        for sequence, length in enumerate(batch.lengths.tolist()):
            pages = batch.table[sequence, : pages_of(length)].long()
            keys, values = (side[pages].flatten(0, 1)[:length] for side in (cache.keys, cache.values))
            mixed.append(_attended(queries[begins[sequence] : begins[sequence + 1]], keys, values))
        return torch.cat(mixed).to(self.dtype)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=1)
        # one row at a time: vectorised code and the code for what is left over differ in the last bit
        return torch.stack([F.silu(row.clone()) for row in gate]).mul_(up).to(self.dtype)


def _attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of one sequence's last positions: queries [count, heads, size], keys and values [length, key heads, size]."""
    (count, heads, size), (length, shared, _) = queries.shape, keys.shape
    grouped = queries.float().view(count, shared, heads // shared, size).permute(1, 2, 0, 3)
    scores = grouped @ keys.float().permute(1, 2, 0)[:, None] * size**-0.5
    seen = torch.ones(count, length, dtype=torch.bool, device=queries.device).tril_(length - count)
    weights = scores.masked_fill_(~seen, -torch.inf).softmax(dim=-1)
    mixed: torch.Tensor = weights @ values.float().transpose(0, 1)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(count, heads, size)


def _normed(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    mean = rows.square().sum(dim=-1, keepdim=True) / rows.shape[-1]
    return rows / (mean + epsilon).sqrt_() * weight


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first half of a head's dimensions are the real parts, the second the imaginary ones."""
    real, imaginary = heads.float().chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)
