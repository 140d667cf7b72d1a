"""How fast an engine goes, as it is seen. Pure."""

from __future__ import annotations

_HALF_LIFE_S = 5.0


class Rate:
    """Tokens a second over the last seconds of work; recent work counts more."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def per_s(self) -> float | None:
        """None before anything was measured."""
        return self._tokens / self._seconds if self._seconds else None

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        kept = 0.5 ** (seconds / _HALF_LIFE_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds


class Fading:
    """The mean of numbers of which each counts less than the ones after it."""

    __slots__ = ("_keep", "_sum", "_weight")

    def __init__(self, keep: float, mean: float = 0.0, weight: float = 0.0) -> None:
        """`keep`: what a number still counts once another has come. `weight`: how many numbers `mean` stands for."""
        self._keep = keep
        self._sum, self._weight = mean * weight, weight

    @property
    def mean(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, number: float) -> None:
        self._sum = self._sum * self._keep + number
        self._weight = self._weight * self._keep + 1
