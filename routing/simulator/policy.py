"""What a policy under test is asked."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from routing.simulator.engine import Engine
from routing.simulator.trace import Arrival


class Policy(Protocol):
    """Chooses an engine for a request, by what the engines are like at this moment: their state is up to date."""

    def choose(self, arrival: Arrival, now_ms: float, engines: Many[Engine]) -> int:
        """The index of an engine. It may read them, and must not change them."""


class RoundRobin:
    """One engine after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, now_ms: float, engines: Many[Engine]) -> int:
        self._next += 1
        return (self._next - 1) % len(engines)
