"""How engines share a model's traffic, as it really is: how far that is from what would be best, and how it swings."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

from routing.curve import Curve
from routing.optimizer import HEADROOM

K = TypeVar("K", bound=Hashable)

WINDOW_MS = 30_000.0
"""Long beside a burst, short beside a feedback loop"""
LEAST_PER_S = 0.5
"""Requests a second of a model, below which its engines' loads say nothing: a handful in all that is remembered"""


def regret(latency: Sequence[Curve], loads: Sequence[float], asked: float, best_ms: float) -> float | None:
    """The part of requests' time that would be saved if the engines shared the load best: 0 if they do, below 1.

    `latency`, `loads`: of each engine, the latter as it was lately, in requests a second. `asked`: how many these are
    taken to be together, those for which `best_ms` is the mean of the best shares. None where there are hardly any.
    """
    total = sum(loads)
    if min(total, asked) < LEAST_PER_S:
        return None
    scale = asked / total
    spent_ms = sum(curve.spent_ms(load * scale, HEADROOM) for curve, load in zip(latency, loads, strict=True))
    return max(1 - best_ms * asked / spent_ms, 0.0)


def by_window(
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


def swing_of_counts(windows: Sequence[Sequence[int]]) -> float:
    """The same for counts of requests, without what chance alone makes of few: k engines that get n requests in a
    window, each drawn alike, differ from an even share by √((k − 1) ÷ n) of it. Windows without any don't count."""
    busy = [window for window in windows if sum(window)]
    if len(busy) < 2:
        return 0.0
    seen = swing([[count / sum(window) for count in window] for window in busy])
    chance = (len(busy[0]) - 1) * fmean(1 / sum(window) for window in busy) * (1 - 1 / len(busy))
    return math.sqrt(max(seen**2 - chance, 0.0))
