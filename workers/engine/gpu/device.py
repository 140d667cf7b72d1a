"""How a pass runs on a device: `Eager` anywhere, one kernel after the other; `graphs.Graphs` replays recorded ones."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.gpu.kernels import Batch
from workers.engine.gpu.model import Model
from workers.engine.gpu.passes import Pass


class Runs(Protocol):
    """Computes one pass at a time."""

    @property
    def decode_rows(self) -> int:
        """Rows that a pass of single tokens may have."""
        ...

    def run(self, work: Pass) -> torch.Tensor:
        """Logits of the drawing rows, [drawing, vocab] float32, on the device."""
        ...


class Eager:
    """Runs a pass as it comes."""

    decode_rows = 256

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self._device = device

    def run(self, work: Pass) -> torch.Tensor:
        rows = self._model.rows(self._batch(work))
        drawing = self._moved(work.drawing)
        if not len(drawing):
            return torch.empty(0, 0, device=self._device)
        return self._model.logits(rows.index_select(0, drawing))

    def _batch(self, work: Pass) -> Batch:
        return Batch(
            decode=work.decode,
            longest=int(np.diff(work.begins).max()),
            ids=self._moved(work.ids),
            positions=self._moved(work.positions),
            cells=self._moved(work.cells),
            begins=self._moved(work.begins),
            lengths=self._moved(work.lengths),
            table=self._moved(work.table),
        )

    def _moved(self, numbers: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)
