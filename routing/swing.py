"""How steadily work is shared: engines' shares, window by window, and how much these vary. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

WINDOW_MS = 30_000.0
"""Long beside a burst, short beside a feedback loop"""


def shares(
    work: Iterable[tuple[float, K, float]], engines: Iterable[K], window_ms: float = WINDOW_MS
) -> list[list[float]]:
    """Window by window each engine's share of the work that came in it. `work`: when, to which engine, how much (> 0).

    A window in which nothing came is left out.
    """
    places = {engine: place for place, engine in enumerate(engines)}
    windows: dict[int, list[float]] = {}
    for at_ms, engine, amount in work:
        windows.setdefault(int(at_ms // window_ms), [0.0] * len(places))[places[engine]] += amount
    return [[each / sum(windows[number]) for each in windows[number]] for number in sorted(windows)]


def swing(windows: Sequence[Sequence[float]]) -> float:
    """How shares vary from window to window: the engines' mean standard deviation, next to an even share. 0 of none."""
    if not windows:
        return 0.0
    return fmean(pstdev(engine) for engine in zip(*windows, strict=True)) * len(windows[0])
