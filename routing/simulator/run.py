"""A trace through a fleet, and what it was like."""

from __future__ import annotations

from collections.abc import Iterable

from routing.simulator.conditions import Conditions
from routing.simulator.fleet import Fleet, MakeIngress
from routing.simulator.flight import Outcome
from routing.simulator.ingress import PeerIngress
from routing.simulator.policy import Policy
from routing.simulator.report import Report, report
from routing.simulator.trace import Arrival

IDEAL = Conditions()
"""Eight engines, one ingress that sees everything as it is, and nothing goes wrong"""


def simulate(arrivals: Iterable[Arrival], policy: Policy, conditions: Conditions = IDEAL) -> Report:
    """A peer's policy, at every ingress the same object: it holds nothing but a place in a circle and a dice."""
    return report(run(arrivals, lambda seat: PeerIngress(policy, seat.engines, seat.indexes), conditions))


def run(arrivals: Iterable[Arrival], make: MakeIngress, conditions: Conditions = IDEAL) -> Outcome:
    """Every request to its end, by ingresses that `make` makes."""
    return Fleet(conditions, make).run(arrivals)
