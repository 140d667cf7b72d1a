"""Latency histograms that add up: what one engine saw and what another saw merge into what both saw.

Bucket i holds values in (γ^(i−1), γ^i] ms, so a quantile is off by at most (γ−1)/(γ+1) = 4.8 %, whatever was merged.
After DDSketch (Masson, Rim, Lee: VLDB 2019), with a fixed range so that a sketch can't outgrow about 260 buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

from routing.errors import BadSketch
from wire.messages import Sketch

GAMMA = 1.1
RELATIVE_ERROR = (GAMMA - 1) / (GAMMA + 1)
MIN_MS = 0.001
"""What is shorter counts as this long"""
MAX_MS = 86_400_000.0
"""What is longer counts as this long"""

_LOG_GAMMA = math.log(GAMMA)


def empty() -> Sketch:
    """A sketch of nothing."""
    return Sketch()


def add(sketch: Sketch, value_ms: float, times: int = 1) -> Sketch:
    """The sketch with one more value, `times` over. ValueError for a negative value and what isn't a number."""
    recorder = Recorder()
    recorder.add(value_ms, times)
    return merge((sketch, recorder.take()))


def merge(sketches: Iterable[Sketch]) -> Sketch:
    """What all of them saw."""
    counts: dict[str, int] = {}
    total, sum_ms = 0, 0.0
    for sketch in sketches:
        total += sketch.total
        sum_ms += sketch.sum_ms
        for index, count in sketch.counts.items():
            counts[index] = counts.get(index, 0) + count
    return Sketch(counts=counts, total=total, sum_ms=sum_ms)


def quantile(sketch: Sketch, q: float) -> float | None:
    """The value in ms that a share `q` of the observations doesn't exceed, ±4.8 %; None if there are none."""
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile is from 0 to 1, not {q}")
    if sketch.total == 0:
        return None
    indexes = sorted(map(int, sketch.counts))
    reached = accumulate(sketch.counts[str(index)] for index in indexes)
    rank = q * (sketch.total - 1)
    index = next(index for index, count in zip(indexes, reached, strict=True) if count > rank)
    return 2 * GAMMA**index / (GAMMA + 1)


def mean(sketch: Sketch) -> float | None:
    """The mean in ms, exact; None if there are no observations."""
    return sketch.sum_ms / sketch.total if sketch.total else None


def check(sketch: Sketch) -> None:
    """BadSketch for one that can't be read: it came from another process, whatever its type says."""
    try:
        indexes = [int(index) for index in sketch.counts]
    except ValueError as exc:
        raise BadSketch("a bucket's index isn't a whole number") from exc
    if any(str(i) not in sketch.counts or not bucket(MIN_MS) <= i <= bucket(MAX_MS) for i in indexes):
        raise BadSketch("a bucket is out of range")
    if any(count < 0 for count in sketch.counts.values()) or sum(sketch.counts.values()) != sketch.total:
        raise BadSketch("the counts don't add up to the total")
    if not 0 <= sketch.sum_ms < math.inf:
        raise BadSketch("the sum isn't a duration")


def bucket(value_ms: float) -> int:
    """The index of the bucket that holds a value in ms; ValueError for a negative one and what isn't a number."""
    if not 0 <= value_ms < math.inf:
        raise ValueError(f"{value_ms} is no duration in ms")
    return math.ceil(math.log(min(max(value_ms, MIN_MS), MAX_MS)) / _LOG_GAMMA)


class Recorder:
    """Collects values between two signals; cheap enough for every token."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0
        self._sum_ms = 0.0

    def add(self, value_ms: float, times: int = 1) -> None:
        """Count a value `times` over. ValueError for a negative one and what isn't a number."""
        index = bucket(value_ms)
        self._counts[index] = self._counts.get(index, 0) + times
        self._total += times
        self._sum_ms += value_ms * times

    def take(self) -> Sketch:
        """Everything since the last `take`."""
        taken = Sketch(
            counts={str(index): count for index, count in self._counts.items()},
            total=self._total,
            sum_ms=self._sum_ms,
        )
        self.__init__()  # type: ignore[misc]
        return taken
