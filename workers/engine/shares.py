"""Passes over whole rows of logits, all rows of a step at once: the part of sampling that torch does.

Whatever rows are beside it and however many threads there are, a row's numbers are the same: each is computed from
that row alone, and sums are taken over 256 ids at a time, in one order, and then over those sums, in one order.
"""

from __future__ import annotations

import numpy as np
import torch

from workers.engine.drawing import Floats

PEAK_IDS = 64
"""ids that one peak stands for"""
SUM_IDS = 256
"""ids that one sum is taken over"""
_COLDEST = 1e-30
"""1 / a temperature below this isn't a float32; anything near it takes the likeliest anyway"""


def peaks_of(rows: Floats) -> Floats:
    """The largest of each 64 neighbours: [rows, vocab] → [rows, ⌈vocab / 64⌉]. NaN where one is NaN."""
    values = torch.from_numpy(rows)
    whole = values.shape[1] // PEAK_IDS * PEAK_IDS
    peaks = values[:, :whole].view(len(rows), -1, PEAK_IDS).amax(2)
    if whole < values.shape[1]:
        peaks = torch.cat((peaks, values[:, whole:].amax(1, keepdim=True)), 1)
    out: Floats = peaks.numpy()
    return out


class Softmax:
    """Rows of scores → shares of 1, in memory of its own that the next call writes over."""

    def __init__(self) -> None:
        self._space = torch.empty(0, 0)

    def __call__(self, rows: list[Floats] | Floats, temperatures: list[float]) -> tuple[Floats, Floats]:
        """Shares, filled up with zeros to a multiple of 256: [rows, ids]; and their sums: [rows, ids / 256]."""
        width = len(rows[0])
        space = self._room(len(rows), -(-width // SUM_IDS) * SUM_IDS)
        if isinstance(rows, np.ndarray) and width == space.shape[1] and set(temperatures) == {1.0}:
            scaled = torch.from_numpy(rows)  # saves a pass
        else:
            scaled = _scaled(rows, temperatures, space)
        torch.softmax(scaled, 1, out=space)
        return space.numpy(), space.view(len(rows), -1, SUM_IDS).sum(2).numpy()

    def _room(self, rows: int, ids: int) -> torch.Tensor:
        if len(self._space) < rows or self._space.shape[1] != ids:
            self._space = torch.empty(rows, ids)
        return self._space[:rows]


def _scaled(rows: list[Floats] | Floats, temperatures: list[float], space: torch.Tensor) -> torch.Tensor:
    """The rows over their temperatures, in `space`, filled up with what has no share."""
    width = len(rows[0])
    factors = torch.tensor([1 / max(temperature, _COLDEST) for temperature in temperatures])
    if isinstance(rows, np.ndarray):
        torch.mul(torch.from_numpy(rows), factors[:, None], out=space[:, :width])
    else:
        for row, factor, into in zip(rows, factors, space, strict=True):
            torch.mul(torch.from_numpy(row), factor, out=into[:width])
    space[:, width:] = -torch.inf
    return space
