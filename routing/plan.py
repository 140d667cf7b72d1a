"""From the engines of a model, and the traffic it has, to the weights of each region and the reason for them.

Which engines there are and what they can do is the optimizer's input; its answer is turned into shares. A GPU engine
that is ready comes before the CPU pool, which takes all of the traffic when there is none, and what the GPU engines
have no room for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from routing.curve import Curve
from routing.optimizer import Group, Problem, Solution, solve
from routing.penalties import weight_factor
from routing.profile import UNMEASURED, Mix, Profile, curves, rate, slowed
from routing.shares import regret
from routing.shed import PATIENCE_MS, by_priority, refused, waiting
from wire.messages import EngineSignal, Route

QUEUE_TOLERANCE = 0.5
"""Waiting requests per slot that a pool may have before it counts as over capacity, whatever was expected"""
MAX_FALLBACK = 0.5
"""Of a model's traffic, for queues alone, while a GPU engine is ready"""
FALLBACK = 50.0
"""What a request in the CPU pool counts more, in a GPU request's time without load: as one more costs GPU engines that
are full to 1 − 50^−½ = 86 %"""
MOVED = 0.025
"""Of a prompt's time, what it costs to send a request where it wasn't sent before: about a quarter of a prompt is
cached where it was, and about one in ten requests begins a session"""
LEAST_DEMAND = 1e-3
"""Requests a second of a region that has none: it still needs weights for the first"""

TYPICAL = Mix()
Place = tuple[str, str, str]
"""Region, pool and version: what a group has in common"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine as control knows it: what it said last, what it has shown it can do, and how far it is trusted."""

    signal: EngineSignal
    profile: Profile = UNMEASURED
    penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is asked of a model."""

    demand: Mapping[str, float] = field(default_factory=dict)
    """requests a second that come, by region; refused ones too: the share to refuse is one of all that come"""
    refused: Mapping[str, float] = field(default_factory=dict)
    """of these, by region: that ingresses refuse now"""
    mix: Mix = TYPICAL
    priorities: Mapping[int, float] = field(default_factory=dict)
    """requests a second by priority, over all regions"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where requests may go, and how far that is."""

    trips_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    forbidden: frozenset[tuple[str, str]] = frozenset()
    """(from, to)"""
    rollout: Mapping[str, float] = field(default_factory=dict)
    """by version, the share of all traffic that it gets; one that isn't named gets none. Empty: none is limited"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Shares of a model's traffic from one region: they sum to 1, or there are none and `why` says what is missing."""

    routes: tuple[Route, ...]
    fallback: float
    why: str
    demand: float = 0.0
    shed: Mapping[int, float] = field(default_factory=dict)
    """by priority, the share to refuse"""
    prices: Mapping[str, float] = field(default_factory=dict)
    flows: Mapping[Place, float] = field(default_factory=dict)
    """shares by group: what the next plan is compared with"""
    regret: float | None = None
    """the part of the model's requests' time that its engines would save by sharing them best; None: too few"""


NO_TRAFFIC = Traffic()
NO_NETWORK = Network()


def plan(
    engines: Iterable[EngineView],
    regions: Sequence[str] = ("local",),
    traffic: Traffic = NO_TRAFFIC,
    network: Network = NO_NETWORK,
    before: Mapping[str, Plan] | None = None,
    patience_ms: float = PATIENCE_MS,
) -> dict[str, Plan]:
    """Each region's plan, for the engines of one model that were heard of lately, each by its primary shard.

    `patience_ms`: how long a request may be expected to wait before some are refused.
    """
    heard = list(engines)
    ready = _primaries(heard)
    if not ready:
        return {region: Plan(routes=(), fallback=0.0, why=_nobody(heard)) for region in regions}
    latency = [
        slowed(curve, weight_factor(view.penalty))
        for curve, view in zip(curves((view.profile for view in ready), traffic.mix), ready, strict=True)
    ]
    groups: dict[Place, list[int]] = defaultdict(list)
    for n, view in enumerate(ready):
        groups[view.signal.fleet.region, view.signal.fleet.pool, view.signal.fleet.version].append(n)
    demand = {region: max(traffic.demand.get(region, 0.0), LEAST_DEMAND) for region in regions}
    solution = solve(_problem(groups, latency, demand, traffic.mix, network, before or {}))
    served = [view.profile.load for view in ready]
    lost = regret(latency, served, sum(solution.flows.values()), solution.serving_ms)
    chosen = _Chosen(ready, latency, groups, solution, network, sum(demand.values()), patience_ms, lost)
    return {region: chosen.plan(region, demand[region], traffic) for region in regions}


def _problem(
    groups: Mapping[Place, list[int]],
    latency: Sequence[Curve],
    demand: Mapping[str, float],
    mix: Mix,
    network: Network,
    before: Mapping[str, Plan],
) -> Problem:
    places = list(groups)
    serving = [n for place, members in groups.items() if place[1] == "gpu" for n in members]
    fallback_ms = FALLBACK * max((latency[n].scale_ms for n in serving), default=0.0)
    shares = {
        (region, places.index(place)): share
        for region, plan in before.items()
        for place, share in plan.flows.items()
        if place in groups
    }
    return Problem(
        demand=demand,
        groups=tuple(
            Group(
                region=region,
                version=version,
                engines=tuple(latency[n] for n in groups[region, pool, version]),
                extra_ms=0.0 if pool == "gpu" else fallback_ms,
            )
            for region, pool, version in places
        ),
        trips_ms=network.trips_ms,
        forbidden=network.forbidden,
        ceilings=_ceilings(network.rollout, {version for _, _, version in places}),
        before=shares,
        move_ms=MOVED * max(curve.scale_ms for curve in latency) / max(mix.answer_tokens, 1.0),
    )


def _ceilings(rollout: Mapping[str, float], versions: Iterable[str]) -> Mapping[str, float]:
    """What versions may get at most, where that isn't all."""
    shares = {version: rollout.get(version, 0.0) for version in sorted(versions)} if rollout else {}
    return {version: share for version, share in shares.items() if share < 1}


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The optimizer's answer, and what its groups are made of."""

    ready: Sequence[EngineView]
    latency: Sequence[Curve]
    groups: Mapping[Place, list[int]]
    solution: Solution
    network: Network
    demand: float
    """requests a second, of all regions"""
    patience_ms: float
    regret: float | None

    def plan(self, region: str, demand: float, traffic: Traffic) -> Plan:
        solution = self.solution
        flows = {
            place: flow
            for m, place in enumerate(self.groups)
            if (flow := solution.flows.get((region, m), 0.0)) > demand * 1e-9
        }
        if not flows:  # there is no room for any of it; it goes where it may, as there is room for others
            flows = {
                place: sum(self.latency[n].capacity for n in self.groups[place]) for place in self._open_to(region)
            }
        if not flows:
            return Plan(routes=(), fallback=0.0, why=f"no engine may serve requests from {region}", demand=demand)
        total = sum(flows.values())
        flowing = _spilled({place: flow / total for place, flow in flows.items()}, self._overflow(), self.groups)
        fallback = sum(share for place, share in flowing.items() if place[1] != "gpu")
        prices = {"request_ms": solution.demand_price_ms[region], "latency_ms": solution.latency_ms}
        prices |= {
            f"capacity {place[0]}/{place[1]}/{place[2]}": price
            for place, price in zip(self.groups, solution.capacity_price_ms, strict=True)
            if price > 0
        }
        routes = tuple(self._routes(flowing))
        part = self._refused(routes)
        return Plan(
            routes=routes,
            fallback=fallback,
            why=self._why(fallback, part, solution.refused[region] / demand, traffic.refused.get(region, 0.0)),
            demand=demand,
            shed=by_priority(part, traffic.priorities),
            prices=prices,
            flows=flowing,
            regret=self.regret,
        )

    def _refused(self, routes: Iterable[Route]) -> float:
        """The share to refuse, by the queues of the engines that get the region's traffic."""
        weights = {(route.fleet, route.shard): route.weight for route in routes}
        queues = [
            waiting(view.signal, view.profile, weights.get((view.signal.fleet, view.signal.shards[0]), 0.0))
            for view in self.ready
        ]
        return refused(queues, self.demand, self.patience_ms)

    def _open_to(self, region: str) -> list[Place]:
        return [place for place in self.groups if (region, place[0]) not in self.network.forbidden]

    def _routes(self, shares: Mapping[Place, float]) -> Iterable[Route]:
        for place, parts in zip(self.groups, self.solution.shares, strict=True):
            for n, part in zip(self.groups[place], parts, strict=True):
                if place in shares:
                    yield _route(self.ready[n], self.latency[n], shares[place] * part)

    def _overflow(self) -> float:
        """The share of the GPU engines' requests that waits beyond what may wait, if a CPU engine has a free slot."""
        gpu = [view.signal for view in self.ready if view.signal.fleet.pool == "gpu"]
        cpu = [view.signal for view in self.ready if view.signal.fleet.pool != "gpu"]
        if not gpu or not any(signal.running < signal.slots for signal in cpu):
            return 0.0
        queued = sum(max(signal.queued_requests, 0) for signal in gpu)
        running = sum(max(signal.running, 0) for signal in gpu)
        beyond = queued - QUEUE_TOLERANCE * sum(max(signal.slots, 0) for signal in gpu)
        return min(beyond / (queued + running), MAX_FALLBACK) if beyond > 0 else 0.0

    def _why(self, fallback: float, part: float, beyond: float, refused_per_s: float) -> str:
        if part > 0:
            return f"requests wait for longer than they may: {part:.0%} is refused"
        return self._serving(fallback, beyond) + ("; ingresses refuse some" if refused_per_s > 0 else "")

    def _serving(self, fallback: float, beyond: float) -> str:
        there = {version for _, _, version in self.groups}
        for version, share in sorted(self.network.rollout.items()):
            if share > 0 and version not in there:
                return f"version {version} gets {share:.0%} of the traffic, and no engine of it is ready"
        if beyond > 1e-3:
            return f"{beyond:.0%} more is asked than engines are expected to do"
        if not any(place[1] == "gpu" for place in self.groups):
            return "the CPU pool serves: no GPU engine is ready"
        if fallback > 0:
            return f"the GPU engines are over capacity: the CPU pool takes {fallback:.0%}"
        return "the GPU engines serve"


def _spilled(shares: dict[Place, float], least: float, groups: Mapping[Place, list[int]]) -> dict[Place, float]:
    """Shares of which the CPU pool has at least so much."""
    cpu = [place for place in groups if place[1] != "gpu"]
    had = sum(shares.get(place, 0.0) for place in cpu)
    if had >= least or not cpu:
        return shares
    kept = {place: share * (1 - least) / (1 - had) for place, share in shares.items() if place[1] == "gpu"}
    engines = sum(len(groups[place]) for place in cpu)
    return kept | {place: least * len(groups[place]) / engines for place in cpu}


def _primaries(engines: Sequence[EngineView]) -> list[EngineView]:
    """The ready engines that own a shard. Of two that claim one as their primary, the one heard later has it."""
    owners = {}
    for view in sorted(engines, key=lambda view: (view.signal.at_ms, view.signal.incarnation)):
        if view.signal.state == "ready" and view.signal.shards:
            owners[view.signal.fleet, view.signal.shards[0]] = view
    return [owners[place] for place in sorted(owners)]


def _nobody(heard: list[EngineView]) -> str:
    if not heard:
        return "no engine has been heard of lately"
    states = Counter(view.signal.state for view in heard)
    return "no engine is ready: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _route(view: EngineView, curve: Curve, weight: float) -> Route:
    signal = view.signal
    return Route(
        fleet=signal.fleet,
        shard=signal.shards[0],
        engine=signal.engine,
        weight=weight,
        queued_requests=signal.queued_requests,
        free_slots=max(signal.slots - signal.running, 0),
        prefill_tokens_per_s=rate(view.profile.prefill_tokens_per_s),
        decode_tokens_per_s=rate(view.profile.decode_tokens_per_s),
        capacity=curve.capacity,
        penalty=view.penalty,
    )
