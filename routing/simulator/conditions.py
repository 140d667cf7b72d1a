"""What a fleet is made of, who routes to it, and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from routing.simulator.engine import Rule, first_come
from routing.simulator.timing import COLD, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """An engine dies without a word; from `until_ms` on it is back, with an empty cache."""

    engine: int
    at_ms: float
    until_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A gray failure: an engine works, but takes `factor` times as long."""

    engine: int
    at_ms: float
    until_ms: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """Nothing gets into a region or out of it; what it has itself goes on."""

    region: str
    at_ms: float
    until_ms: float


Fault = Crash | Slow | CutOff


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The circumstances of a run."""

    timings: tuple[Timing, ...] = (COLD,) * 8
    """one an engine"""
    rule: Rule = first_come
    regions: tuple[str, ...] = ("",)
    """of the engines, over and over"""
    rtt_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """round trip between two different regions, by (from, to)"""
    ingresses: int = 1
    """in each region that requests come from"""
    signal_ms: float = 0.0
    """between an engine's signals; 0: everybody sees everything as it is"""
    follow_ms: float | None = None
    """after so long an ingress knows what its siblings in the region sent; None: never"""
    faults: tuple[Fault, ...] = ()
    patience_ms: float = 10_000.0
    """A request that no engine has begun to answer after so long has failed"""
    seed: int = 0

    def region(self, engine: int) -> str:
        """Where an engine stands."""
        return self.regions[engine % len(self.regions)]

    def one_way_ms(self, here: str, there: str) -> float:
        """Half a round trip; 0 within a region."""
        return 0.0 if here == there else self.rtt_ms.get((here, there), self.rtt_ms.get((there, here), 0.0)) / 2
