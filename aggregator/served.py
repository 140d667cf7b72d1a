"""How many requests each engine ended, window by window: what the swing of the shares is measured by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from routing.shares import swing_of_counts

WINDOW_MS = 10_000
"""Long beside a request, so that a window says more than who happened to end in it"""
WINDOWS = 12
"""Two minutes: a loop that swings more slowly than that does no harm"""


@dataclass(slots=True)
class _Model:
    """One model's engines since they are these."""

    engines: frozenset[str]
    windows: dict[int, Counter[str]] = field(default_factory=dict)


class Served:
    """Counts by model, engine and window. Times are those of `aggregator.windows`."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def add(self, model: str, engine: str, ended: int, time_ms: float) -> None:
        """An engine says how many requests it ended since its last signal."""
        if (known := self._models.get(model)) is not None:
            known.windows.setdefault(int(time_ms // WINDOW_MS), Counter())[engine] += max(ended, 0)

    def swing(self, model: str, engines: Iterable[str], time_ms: float) -> float | None:
        """How the ready engines' shares vary; None until these were the same for two windows."""
        there = frozenset(engines)
        known = self._models.get(model)
        if known is None or known.engines != there:
            known = self._models[model] = _Model(there)
        now = int(time_ms // WINDOW_MS)
        known.windows = {number: counts for number, counts in known.windows.items() if number >= now - WINDOWS}
        whole = sorted(number for number in known.windows if number < now)[1:]  # the first one began in its midst
        if len(there) < 2 or len(whole) < 2:
            return None
        return swing_of_counts([[known.windows[number][engine] for engine in sorted(there)] for number in whole])
