"""What draws tokens, whichever arithmetic it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wire.messages import Logprob
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation

Floats = npt.NDArray[np.float32]
Drawn = tuple[int, Logprob | None]
Uniform = Callable[[int, int, int], float]
"""(seed, choice, position) → a number in [0, 1)"""
UNUSABLE = "the model gave no usable numbers for this request"


class Sampler(Protocol):
    """Logits, [rows, vocab], to tokens: for each row a function of that row, its choice's past and its draw alone."""

    @property
    def fingerprint(self) -> str:
        """Which arithmetic this is: another may draw other tokens where a draw falls on a border."""
        ...

    def draw(self, logits: Floats, asks: Sequence[tuple[int, Generation]]) -> list[Drawn | SamplingFailed]:
        """For each (row of the logits, choice) the next token, and its logprob if asked for.

        SamplingFailed, as a value, for a row that holds no usable numbers: the others go on.
        """
        ...

    def score(self, logits: Floats, tokens: Sequence[int], count: int) -> list[Logprob]:
        """The logprob of a token in each row, and of the `count` likeliest there. SamplingFailed."""
        ...
