"""CUDA graphs for passes of single tokens: a step of a small model is hundreds of kernels, and to start each from
Python would take longer than to run it.

A graph is recorded for each of `SIZES` rows over fixed buffers; a pass fills them and replays the smallest that holds
it. Rows that are left over write to the scratch page and see only that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workers.engine.gpu.device import Eager
from workers.engine.gpu.kernels import Batch
from workers.engine.gpu.model import Model
from workers.engine.gpu.pages import PAGE_TOKENS
from workers.engine.gpu.passes import Ints, Pass

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WARM_UPS = 2
"""runs before a recording: kernels are compiled and libraries set up by then, which a recording doesn't allow"""


def size_for(rows: int) -> int:
    """The rows of the graph that a pass of so many rows runs in."""
    return next(size for size in SIZES if size >= rows)


class Staged:
    """The numbers of a pass, padded, in one piece of memory, so that one copy brings them to the device."""

    def __init__(self, pages: int, device: torch.device) -> None:
        """`pages`: of the longest sequence."""
        rows = SIZES[-1]
        self._host = torch.zeros(rows * (4 + pages), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(rows * (4 + pages), dtype=torch.int32, device=device)
        self._begins = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._numbers: Ints = self._host.numpy()
        self._columns = self._numbers[: rows * 4].reshape(4, rows)
        self._table = self._numbers[rows * 4 :].reshape(rows, pages)
        self._padding = np.arange(rows, dtype=np.int32) % PAGE_TOKENS

    def batch(self, size: int) -> Batch:
        """Of the first `size` rows, always at the same addresses."""
        rows = SIZES[-1]
        ids, positions, cells, lengths = self._device[: rows * 4].view(4, rows)[:, :size]
        return Batch(
            decode=True,
            longest=1,
            ids=ids,
            positions=positions,
            cells=cells,
            begins=self._begins[: size + 1],
            lengths=lengths,
            table=self._device[rows * 4 :].view(rows, -1)[:size],
        )

    def fill(self, work: Pass) -> None:
        """Set the rows of a pass, and make the others harmless."""
        rows = len(work.ids)
        for column, numbers in zip(self._columns, (work.ids, work.positions, work.cells, work.lengths), strict=True):
            column[:rows] = numbers
        self._columns[:2, rows:] = 0
        self._columns[2, rows:] = self._padding[rows:]
        self._columns[3, rows:] = 1
        self._table[:rows] = work.table
        self._table[rows:] = 0
        self._device.copy_(self._host, non_blocking=True)


class Graphs:
    """Runs single tokens by replay, and prompts as they come."""

    decode_rows = SIZES[-1]

    def __init__(self, model: Model, device: torch.device, *, pages: int) -> None:
        """Record. `pages`: of the longest sequence."""
        self._eager = Eager(model, device)
        self._device = device
        self._staged = Staged(pages, device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for size in reversed(SIZES):  # the largest first: the others fit into its memory
                self._graphs[size] = _recorded(model, self._staged.batch(size), pool)

    def run(self, work: Pass) -> torch.Tensor:
        if not work.decode:
            return self._eager.run(work)
        self._copied.synchronize()  # the last pass has read what is written over now
        self._staged.fill(work)
        self._copied.record()
        graph, logits = self._graphs[size_for(len(work.ids))]
        graph.replay()
        drawing = torch.from_numpy(work.drawing).to(self._device, non_blocking=True)
        return logits.index_select(0, drawing)


def _recorded(model: Model, batch: Batch, pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            model.logits(model.rows(batch))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = model.logits(model.rows(batch))
    return graph, logits
