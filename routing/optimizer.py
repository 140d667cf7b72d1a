"""How much of each region's traffic each group of engines should serve: the least total latency, by HiGHS.

    minimise   Σ trip·flow + Σ cost(load) + MOVE · Σ moved + LOST · Σ refused
    where      every region's flows and what is refused are its demand
               a group's load is what flows to it, and at most its capacity less headroom
               flows aren't negative, and are zero where a region's requests must not go
               a version gets at most the share that its rollout allows
               moved is what a flow is above its last share of today's demand

`cost` is convex (`routing.curve`), so it is the highest of its tangents: the linear program starts with a few of them,
and gets those at its own answer until they agree (Kelley's cutting planes). Engines of one region, pool and version are
one group: the same trips and limits hold for them, and their best shares of a load need no linear program.

Infeasible can't be: what no group has room for is refused, and said. The duals are the shadow prices.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray

from routing.curve import Curve, Curves

Floats = NDArray[np.float64]

HEADROOM = 0.95
"""Of an engine's capacity: at it a request takes 20 times as long as without load, and a burst has nowhere to go"""
LOST = 10.0
"""What refusing a request counts, in what the dearest request could cost: so none is refused for others' comfort"""
EVEN = 0.5
"""A group that has less load is shared as if it had so much of its capacity: the best shares of a small load would put
all of it on whichever engine was measured a little faster"""
GAP = 1e-5
"""The tangents agree if they are this near to the cost, of its own size"""
ROUNDS = 30
"""Of tangents at most; three to six are enough"""
KNOTS = (0.0, 0.3, 0.5, 0.65, 0.75, 0.83, 0.89, 0.94, 0.97, 1.0)
"""Of a group's capacity: the first tangents, closer where the cost is more curved"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Engines of one region, pool and version."""

    region: str
    engines: tuple[Curve, ...]
    extra_ms: float = 0.0
    """what it counts more than it takes: a pool that only stands in for another"""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be shared."""

    demand: Mapping[str, float]
    """requests a second, by the region they come from"""
    groups: tuple[Group, ...]
    trips_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """round trips, both ways; what isn't named takes none"""
    forbidden: frozenset[tuple[str, str]] = frozenset()
    """(from, to): regions whose requests must not go there"""
    ceilings: Mapping[str, float] = field(default_factory=dict)
    """by version, the share of all traffic that it may get"""
    before: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(region, group) → the share of the region's traffic that the group had last; empty: nothing is lost by moving"""
    move_ms: float = 0.0
    """what it costs that a request comes to a group that has not its prompt's beginning"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best flows."""

    flows: Mapping[tuple[str, int], float]
    """(region, group) → requests a second"""
    shares: tuple[tuple[float, ...], ...]
    """by group and engine: its part of the group's load; a group's sum to 1"""
    refused: Mapping[str, float]
    """by region, requests a second that no group has room for"""
    demand_price_ms: Mapping[str, float]
    """what one more request from a region would cost in all"""
    capacity_price_ms: tuple[float, ...]
    """what one more request a second of capacity would save, by group; 0 where there is room"""
    latency_ms: float
    """a served request's mean, trip included"""
    serving_ms: float
    """the same without trips"""


def solve(problem: Problem) -> Solution:
    """The best flows; all demand is routed or refused, and nothing but capacity refuses it."""
    curves = Curves([list(group.engines) for group in problem.groups], HEADROOM)
    program = _Program(problem, curves)
    cost, price = curves.cost(np.outer(KNOTS, curves.capacity))
    for knot, load in enumerate(np.outer(KNOTS, curves.capacity)):
        program.tangents(load, cost[knot], price[knot])
    for _ in range(ROUNDS):
        loads, believed = program.run()
        (cost,), (price,) = curves.cost(loads[None, :])
        if (cost - believed).sum() <= GAP * max(cost.sum(), 1.0):
            break
        program.tangents(loads, cost, price)
    return program.solution(curves, loads, float(cost.sum()))


@functools.cache
def _greeted() -> None:
    """HiGHS greets on standard output once a process, whatever its options; there it would be in somebody's JSON."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        highspy.Highs()  # type: ignore[no-untyped-call]
        libc.fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class _Program:
    """The linear program. Columns: the flows, what of them moved, the groups' loads and costs, what is refused."""

    def __init__(self, problem: Problem, curves: Curves) -> None:
        self._problem = problem
        self._regions = [region for region, demand in problem.demand.items() if demand > 0]
        self._pairs = [
            (n, m)
            for n, region in enumerate(self._regions)
            for m, group in enumerate(problem.groups)
            if (region, group.region) not in problem.forbidden
        ]
        flows, groups = len(self._pairs), len(problem.groups)
        self._moved = flows
        self._load = self._moved + (flows if problem.before else 0)
        self._cost = self._load + groups
        self._refused = self._cost + groups
        _greeted()
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.setOptionValue("log_to_console", False)
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._columns(curves)
        self._rows()

    def tangents(self, loads: Floats, cost: Floats, price: Floats) -> None:
        """A group's cost is at least cost + price · (load − loads)."""
        for group in range(len(loads)):
            columns = np.array([self._load + group, self._cost + group], dtype=np.int32)
            values = np.array([-price[group], 1.0])
            self._highs.addRow(cost[group] - price[group] * loads[group], highspy.kHighsInf, 2, columns, values)

    def run(self) -> tuple[Floats, Floats]:
        """The groups' loads, and what they are believed to cost."""
        self._highs.run()
        values = np.array(self._highs.getSolution().col_value)
        return np.maximum(values[self._load : self._cost], 0.0), values[self._cost : self._refused]

    def solution(self, curves: Curves, loads: Floats, cost: float) -> Solution:
        """The answer, from the last run."""
        solved = self._highs.getSolution()
        values, prices = np.maximum(solved.col_value, 0.0), np.array(solved.row_dual)
        flows = {
            (self._regions[n], m): float(values[column])
            for column, (n, m) in enumerate(self._pairs)
            if values[column] > 0
        }
        trips = sum(flow * self._trip_ms(region, group) for (region, group), flow in flows.items())
        served, parts = sum(flows.values()), curves.share(np.maximum(loads, EVEN * curves.capacity)[None, :])[0]
        ends = np.cumsum([len(group.engines) for group in self._problem.groups])
        return Solution(
            flows=flows,
            shares=tuple(tuple((part / part.sum()).tolist()) for part in np.split(parts, ends[:-1])),
            refused={region: float(values[self._refused + n]) for n, region in enumerate(self._regions)},
            demand_price_ms={region: float(prices[n]) for n, region in enumerate(self._regions)},
            capacity_price_ms=tuple(
                max(0.0, -float(solved.col_dual[self._load + m])) for m in range(len(self._problem.groups))
            ),
            latency_ms=(cost + trips) / served if served > 0 else 0.0,
            serving_ms=cost / served if served > 0 else 0.0,
        )

    def _trip_ms(self, region: str, group: int) -> float:
        there, trips = self._problem.groups[group].region, self._problem.trips_ms
        return trips.get((region, there), trips.get((there, region), 0.0))

    def _columns(self, curves: Curves) -> None:
        problem, infinite = self._problem, highspy.kHighsInf
        flow_costs = [self._trip_ms(self._regions[n], m) + problem.groups[m].extra_ms for n, m in self._pairs]
        moved_costs = [problem.move_ms] * (self._load - self._moved)
        groups, regions = len(problem.groups), len(self._regions)
        lost_ms = LOST * (curves.most_ms + max(flow_costs, default=0.0) + problem.move_ms)
        costs = [*flow_costs, *moved_costs, *([0.0] * groups), *([1.0] * groups), *([lost_ms] * regions)]
        upper = [*([infinite] * self._load), *curves.capacity.tolist(), *([infinite] * (groups + regions))]
        none = np.array([], dtype=np.int32)
        self._highs.addCols(
            len(costs), np.array(costs), np.zeros(len(costs)), np.array(upper), 0, none, none, np.array([])
        )

    def _rows(self) -> None:
        problem = self._problem
        demand = [problem.demand[region] for region in self._regions]
        for n, wanted in enumerate(demand):
            mine = [column for column, (region, _) in enumerate(self._pairs) if region == n]
            self._row(wanted, wanted, [*mine, self._refused + n], [1.0] * (len(mine) + 1))
        for m in range(len(problem.groups)):
            mine = [column for column, (_, group) in enumerate(self._pairs) if group == m]
            self._row(0.0, 0.0, [*mine, self._load + m], [*([1.0] * len(mine)), -1.0])
        for version, share in problem.ceilings.items():
            mine = [column for column, (_, group) in enumerate(self._pairs) if problem.groups[group].version == version]
            self._row(-highspy.kHighsInf, share * sum(demand), mine, [1.0] * len(mine))
        if problem.before:
            for column, (n, m) in enumerate(self._pairs):
                had = problem.before.get((self._regions[n], m), 0.0) * demand[n]
                self._row(-highspy.kHighsInf, had, [column, self._moved + column], [1.0, -1.0])

    def _row(self, lower: float, upper: float, columns: list[int], values: list[float]) -> None:
        self._highs.addRow(lower, upper, len(columns), np.array(columns, dtype=np.int32), np.array(values))
