"""Linear layers whose products add up exactly in float32, so that a row's result depends on that row alone (R8).

Each output channel is quantised to whole numbers w from −511 to 511 and a scale; each row of activations, at run time,
to whole numbers a and a scale. float32 holds every whole number up to 2²⁴. By Cauchy and Schwarz a sum of products over
any part of a channel is at most ‖a‖ · ‖w‖, so a row that is scaled to ‖a‖ ≤ 2²⁴ / max ‖w‖ is multiplied exactly, in
whatever order a kernel adds: neither the rows beside it, nor the number of threads, nor the library's choice of kernel
can change a bit. With 576 to 1,536 inputs that leaves activations about eight bits at their root mean square, and more
to whatever stands out: weights and activations lose about as little.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_EXACT = 1 << 24
_LARGEST = 511
_MARGIN = 0.999
"""for the rounding of a row's own norm"""
_TINY = 1e-18
"""stands for the norm of a row of zeros"""


class Linear:
    """y = x · weightᵀ (+ bias), on quantised operands."""

    def __init__(
        self, quantised: torch.Tensor, scale: torch.Tensor, reach: float, bias: torch.Tensor | None = None
    ) -> None:
        outputs, inputs = quantised.shape
        self.outputs = outputs
        self._weight = _packed(quantised.float())
        self._scale = scale
        self._bias = bias
        self._reach = reach * _MARGIN - math.sqrt(inputs) / 2  # rounding adds up to ½ in each place

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of float32, [rows, inputs] → [rows, outputs]."""
        whole, unit = self.quantise(rows)
        out = self.multiply(whole)
        out *= unit
        out *= self._scale
        return out if self._bias is None else out.add_(self._bias)

    def quantise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole numbers, and what one is worth in each row: [rows, 1]."""
        norm = rows.square().sum(dim=1, keepdim=True).sqrt_().clamp_min_(_TINY)
        return (rows * (self._reach / norm)).round_(), norm / self._reach

    def multiply(self, whole: torch.Tensor) -> torch.Tensor:
        """The exact sums of products of whole numbers."""
        if self._weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(whole, self._weight, None, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(whole, self._weight)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers as int16, and a scale for each output channel."""
    scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
    return (weight / scale[:, None]).round().to(torch.int16), scale


def reach_of(quantised: torch.Tensor) -> float:
    """The largest norm of a row for which every partial sum of every channel is exact."""
    heaviest = quantised.double().square().sum(dim=1).max().sqrt().item()
    return _EXACT / max(1.0, heaviest)


def multiplies_exactly(layer: Linear, inputs: int) -> bool:
    """Whether this machine's library computes in float32 proper, not in something shorter that it takes for it."""
    generator = torch.Generator().manual_seed(0)
    rows, _ = layer.quantise(torch.randn(3, inputs, generator=generator))
    units = layer.multiply(torch.eye(inputs)).double()
    return bool(torch.equal(layer.multiply(rows).double(), rows.double() @ units))


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """In the layout oneDNN likes best, where it is there: a third faster for a few dozen rows, the same numbers."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # type: ignore[no-any-return]
