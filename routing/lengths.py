"""How long answers get, learned from those that ended: how many tokens are left to one that has some already.

A mean would do for load, not for a promise: whether a choice that is behind its pace catches up depends on whether it
has tokens left to catch up with, and lengths spread over two orders of magnitude. So the whole distribution is kept, as
a histogram that forgets.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BUCKET_TOKENS = 16
"""Fine beside the spread of lengths, and the table stays small enough for the processor's first cache"""
BUCKETS = 256
"""What is longer than 4,096 tokens counts as that long: it has always enough left to catch up"""
PRIOR_TOKENS = 256.0
"""Mean of the exponential distribution that is assumed at first: within a factor of two of published chat traces"""
PRIOR_WEIGHT = 32.0
"""Answers after which what was seen counts as much as the assumption"""
MEMORY = 4_096.0
"""Answers after which the weight of an old one is 1/e: minutes of a busy model, so that it follows the time of day"""
REFRESH = 32
"""Answers between two looks at the histogram: it changes by less than a hundredth in between, once it is warm"""


class Lengths:
    """Answers' lengths in tokens. `add` what ended; `ended` asks."""

    def __init__(self) -> None:
        edges = np.arange(BUCKETS + 1) * (BUCKET_TOKENS / PRIOR_TOKENS)
        survive = np.exp(-edges)
        self._counts: Floats = (survive[:-1] - survive[1:]) * PRIOR_WEIGHT
        self._new: list[int] = []
        self.table: Floats = self._tabulate()
        """at n: the share of answers shorter than n · BUCKET_TOKENS; the last is 1"""

    def add(self, tokens: int) -> None:
        """An answer ended after so many tokens."""
        self._new.append(tokens)
        if len(self._new) >= REFRESH:
            self.extend(())

    def extend(self, tokens: Iterable[int]) -> None:
        """Answers ended; the table is up to date afterwards."""
        new = [*self._new, *tokens]
        self._new = []
        buckets = np.clip(np.array(new, dtype=np.int64) // BUCKET_TOKENS, 0, BUCKETS - 1)
        self._counts *= np.exp(-len(new) / MEMORY)
        self._counts += np.bincount(buckets, minlength=BUCKETS)
        self.table = self._tabulate()

    def shorter(self, tokens: float) -> float:
        """The share of answers that are shorter."""
        return float(self.table[min(max(int(tokens / BUCKET_TOKENS), 0), len(self.table) - 1)])

    def _tabulate(self) -> Floats:
        middles = (np.arange(BUCKETS) + 0.5) * BUCKET_TOKENS
        self.mean_tokens = float(self._counts @ middles / self._counts.sum())
        shares = np.minimum(np.cumsum(self._counts) / self._counts.sum(), 1.0)
        return np.concatenate(([0.0], shares, [1.0]))
