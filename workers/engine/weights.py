"""What is made of a model directory once, when it is converted, so that every start is fast."""

from __future__ import annotations

from pathlib import Path

from workers.engine import plain_weights, quality
from workers.engine.native import weights as native_weights
from workers.engine.native.build import kernels
from workers.engine.numerics import LATENCY, THROUGHPUT


def precompute(model_dir: Path) -> None:
    """Write the engine's own weights next to the model's, and what each numerics class costs. ModelUnusable."""
    if kernels() is None:
        plain_weights.keep(model_dir)
        return
    for numerics in (THROUGHPUT, LATENCY):
        native_weights.keep(model_dir, numerics)
    quality.record(model_dir)
