"""Starts the Triton kernels, and with flash attention over pages makes of them what a forward pass needs on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch.nn.attention.varlen import varlen_attn

from workers.engine.gpu import triton_kernels as kernels
from workers.engine.gpu.kernels import Batch, Cache, Heads, Matrix, Turn

_EXACT = {"enable_fp_fusion": False}
"""a product and a sum round twice, in every variant of a kernel: else each might fuse others"""
_GATE_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The block of a matrix that a program computes. They differ in speed; `start.check` holds that the bits don't."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


TILES = (
    Tiles(rows=16, outputs=64, inputs=128, warps=4, stages=4),
    Tiles(rows=64, outputs=64, inputs=128, warps=4, stages=3),
    Tiles(rows=128, outputs=128, inputs=64, warps=8, stages=4),
)
"""by rows; the last for more too"""


def tiles_for(rows: int) -> Tiles:
    return next((tiles for tiles in TILES if tiles.rows >= rows), TILES[-1])


class ComputeKernels:
    """All of `workers.engine.gpu.kernels.Kernels` but attention; runs wherever Triton does."""

    name = "triton"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, rows: torch.Tensor, matrix: Matrix, *, wide: bool = False) -> torch.Tensor:
        count, (outputs, inputs) = len(rows), matrix.values.shape
        tiles = tiles_for(count)
        out = rows.new_empty(count, outputs, dtype=torch.float32 if wide else self.dtype)
        kernels.linear[(triton.cdiv(count, tiles.rows) * triton.cdiv(outputs, tiles.outputs),)](
            rows,
            matrix.values,
            matrix.scale,
            matrix.bias,
            out,
            count,
            outputs,
            inputs,
            SCALED=matrix.scale is not None,
            BIASED=matrix.bias is not None,
            EVEN=inputs % tiles.inputs == 0,
            BLOCK_OUTPUTS=tiles.outputs,
            BLOCK_ROWS=tiles.rows,
            BLOCK_INPUTS=tiles.inputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **_EXACT,
        )
        return out

    def norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        count, width = residual.shape
        out = torch.empty_like(residual, dtype=self.dtype)
        block = triton.next_power_of_2(width)
        kernels.norm[(count,)](
            *(residual, delta, weight, out, epsilon),
            WIDTH=width,
            BLOCK=block,
            ADDS=delta is not None,
            num_warps=4 if block <= 4096 else 8,
            **_EXACT,
        )
        return out

    def place(self, mixed: torch.Tensor, heads: Heads, turn: Turn, cache: Cache, batch: Batch) -> torch.Tensor:
        count, half = len(mixed), heads.size // 2
        queries = mixed.new_empty(count, heads.queries, heads.size)
        kernels.place[(count, heads.queries + 2 * heads.keys)](
            *(mixed, heads.query_norm, heads.key_norm, turn.cos, turn.sin, batch.positions, batch.cells),
            *(queries, cache.keys, cache.values, heads.epsilon),
            QUERIES=heads.queries,
            KEYS=heads.keys,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            NORMED=heads.query_norm is not None,
            num_warps=1,
            **_EXACT,
        )
        return queries

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        count, inner = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(count, inner)
        grid = (count, triton.cdiv(inner, _GATE_BLOCK))
        kernels.gate[grid](gate_up, out, INNER=inner, BLOCK=_GATE_BLOCK, num_warps=4, **_EXACT)
        return out


class CudaKernels(ComputeKernels):
    """With torch's flash attention, which reads pages and, with one split, keeps a sequence's order of adding."""

    def __init__(self, context_tokens: int) -> None:
        super().__init__(torch.bfloat16)
        self._context_tokens = context_tokens

    def attend(self, queries: torch.Tensor, cache: Cache, batch: Batch) -> torch.Tensor:
        """Nothing that chooses a kernel depends on the batch: `max_k` is the context, `max_q` 1 or more than 1.

        A single query needs no mask; without one the kernel takes the heads that share a key as its rows.
        """
        mixed = varlen_attn(
            queries,
            cache.keys,
            cache.values,
            batch.begins,
            batch.begins,  # asked for, but it is `lengths` that counts where there is a table
            1 if batch.decode else max(2, batch.longest),
            self._context_tokens,
            window_size=(-1, -1) if batch.decode else (-1, 0),
            enable_gqa=True,
            seqused_k=batch.lengths,
            block_table=batch.table,
            num_splits=1,
        )
        assert isinstance(mixed, torch.Tensor)
        return mixed
