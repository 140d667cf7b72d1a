"""A trace through a fleet, with one ingress that sees everything at once. The plain case; faults are elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many

from routing.simulator.engine import Engine, Rule, first_come
from routing.simulator.policy import Policy
from routing.simulator.report import Report, report
from routing.simulator.timing import COLD, Timing
from routing.simulator.trace import Arrival


def simulate(
    arrivals: Iterable[Arrival],
    policy: Policy,
    *,
    timings: Many[Timing] = (COLD,) * 8,
    rule: Rule = first_come,
) -> Report:
    """Every request goes where the policy says, to its end. `arrivals` in order of time; one timing an engine."""
    engines = [Engine(number, timing, rule) for number, timing in enumerate(timings)]
    for arrival in arrivals:
        for engine in engines:
            engine.advance(arrival.at_ms)
            engine.sync(arrival.at_ms)
        engines[policy.choose(arrival, arrival.at_ms, engines)].add(arrival, arrival.at_ms)
    for engine in engines:
        engine.advance(math.inf)
    return report(sequence for engine in engines for sequence in engine.done)
