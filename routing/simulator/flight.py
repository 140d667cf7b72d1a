"""A request between its client and an engine, and what becomes of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routing.simulator.sequence import UNKNOWN
from routing.simulator.sequence import Sequence as Running
from routing.simulator.timing import Timing
from routing.simulator.trace import Arrival


class Flight:
    """A request on its way."""

    __slots__ = ("arrival", "attempts", "engine", "ingress", "running", "tried")

    def __init__(self, arrival: Arrival, ingress: int) -> None:
        self.arrival = arrival
        self.ingress = ingress
        self.engine = -1
        self.attempts = 0
        self.tried: frozenset[int] = frozenset()
        self.running: Running | None = None
        """None while no engine has it"""

    @property
    def delivered(self) -> bool:
        """Whether its client has seen a part of the answer."""
        return self.running is not None and self.running.first_token_ms != UNKNOWN


@dataclass(slots=True)
class Outcome:
    """What became of all requests."""

    timings: Sequence[Timing]
    """of the engines"""
    ended: list[Running]
    by_engine: list[list[Running]]
    """the same, apart by engine"""
    sends: list[tuple[float, int]]
    """when, and to which engine"""
    shed: int = 0
    failed: int = 0
    ends_ms: float = 0.0
    """when the last request came"""

    @property
    def attempts_per_request(self) -> float:
        """Sends for each request that wasn't shed: what retries make of the load."""
        return len(self.sends) / max(len(self.ended) + self.failed, 1)
