"""Policies that look at load alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from routing.simulator.policy import View
from routing.simulator.trace import Arrival


def least(engines: Sequence[View], among: Sequence[int], draw: Random, cost: Callable[[View], float]) -> int:
    """Of `among`, the one of least cost; ties are broken at random."""
    costs = {index: cost(engines[index]) for index in among}
    lowest = min(costs.values())
    tied = [index for index, value in costs.items() if value == lowest]
    return tied[0] if len(tied) == 1 else draw.choice(tied)


def in_flight(engine: View) -> int:
    """The load that these policies count."""
    return engine.in_flight


class RoundRobin:
    """One engine after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        self._next += 1
        return (self._next - 1) % len(engines)


class LeastLoad:
    """The fewest requests in flight."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        return least(engines, range(len(engines)), self._draw, in_flight)


class PowerOfTwo:
    """Of two engines drawn at random, the one with fewer requests in flight (Mitzenmacher, 2001)."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        drawn = self._draw.sample(range(len(engines)), min(2, len(engines)))
        return least(engines, drawn, self._draw, in_flight)


class Prequal:
    """Hot and cold engines (Wydrowski and others, "Load is not what you should balance", NSDI 2024).

    Hot: more in flight than the QUANTILE of the engines. Of the cold ones the lowest latency; where all are hot, the
    fewest in flight.
    """

    QUANTILE = 0.84

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        loads = sorted(engine.in_flight for engine in engines)
        limit = loads[math.floor(self.QUANTILE * (len(loads) - 1))]
        cold = [index for index, engine in enumerate(engines) if engine.in_flight <= limit]
        if not cold or loads[0] == loads[-1] > 0:
            return least(engines, range(len(engines)), self._draw, in_flight)
        return least(engines, cold, self._draw, lambda engine: engine.ttft_ms)
