"""The control plane in virtual time: `routing.profile` learns from signals, `routing.plan` shares the traffic.

What `aggregator.windows` folds from the log is counted here: engines heard, demand by region, the mean request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import exp

from routing.earlier import Feedback, reweighed
from routing.plan import EngineView, Network, Plan, Traffic, plan
from routing.profile import UNMEASURED, Mix, Profile, learn
from routing.schedule import TARGETS
from routing.simulator.conditions import Conditions
from routing.simulator.trace import Arrival
from wire.fleet import Fleet
from wire.messages import EngineSignal, Snapshot

MODEL = "simulated"
ROUND_MS = 2_000.0
"""Between two rounds: twice as long as in production, where nobody waits for the sum of them"""
SILENT_MS = 2_500.0
"""An engine that was heard this much less recently than another is left out, as in `aggregator.windows`"""
PATIENCE_MS = 2 * TARGETS.ttft_ms
"""What waits for longer has missed its first token's target twice over: refuse some, so that the others keep theirs"""
MEMORY_MS = 10_000.0
"""Demand is the mean over about so long"""


def name_of(region: str) -> str:
    """A region's name where it must not be empty."""
    return region or "here"


def fleet_of(region: str) -> Fleet:
    """The fleet of a region: it has one."""
    return Fleet(region=name_of(region), pool="gpu", slug=MODEL, version="1", numerics="0")


class Control:
    """Hears all signals, and makes a snapshot for each region once a round.

    `feedback`: sets the weights within each region, in place of what the optimizer says.
    """

    def __init__(self, conditions: Conditions, feedback: Feedback | None = None) -> None:
        self._feedback = feedback
        trips_ms = {(name_of(here), name_of(there)): ms for (here, there), ms in conditions.rtt_ms.items()}
        self._network = Network(trips_ms=trips_ms)
        self._signals: dict[str, EngineSignal] = {}
        self._profiles: dict[tuple[str, str], Profile] = {}
        self._regions: list[str] = []
        self._asked: Counter[str] = Counter()
        self._demand: dict[str, float] = {}
        self._prompt_tokens = self._answer_tokens = 0.0
        self._requests = self._answers = 0
        self._plans: dict[str, Plan] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._round_ms = 0.0

    def serve(self, region: str) -> None:
        """Requests come from there, too."""
        if name_of(region) not in self._regions:
            self._regions.append(name_of(region))

    def trip_ms(self, here: str, there: str) -> float:
        """Round trip."""
        trips_ms = self._network.trips_ms
        return trips_ms.get((here, there), trips_ms.get((there, here), 0.0))

    def hear(self, signal: EngineSignal) -> None:
        """An engine's signal."""
        life = (signal.engine, signal.incarnation)
        self._signals[signal.engine] = signal
        self._profiles[life] = learn(self._profiles.get(life, UNMEASURED), signal)
        if self._feedback is not None:
            self._feedback.heard(signal)

    def asked(self, region: str, arrival: Arrival) -> None:
        """A request came."""
        self._asked[region] += 1
        self._prompt_tokens += arrival.prompt_tokens
        self._requests += 1

    def answered(self, tokens: int) -> None:
        """One ended."""
        self._answer_tokens += tokens
        self._answers += 1

    def snapshot(self, region: str, now_ms: float) -> Snapshot | None:
        """The region's latest; None before the first round."""
        if now_ms - self._round_ms >= ROUND_MS and self._signals:
            self._round(now_ms)
        return self._snapshots.get(region)

    def _round(self, now_ms: float) -> None:
        passed_ms, self._round_ms = now_ms - self._round_ms, now_ms
        keep = exp(-passed_ms / MEMORY_MS)
        for region in self._regions:
            lately = self._asked[region] * 1_000 / passed_ms
            self._demand[region] = self._demand.get(region, lately) * keep + lately * (1 - keep)
        self._asked.clear()
        latest_ms = max(signal.at_ms for signal in self._signals.values())
        heard = [signal for signal in self._signals.values() if latest_ms - signal.at_ms <= SILENT_MS]
        views = [EngineView(signal=one, profile=self._profiles[one.engine, one.incarnation]) for one in heard]
        traffic = Traffic(demand=self._demand, mix=self._mix())
        self._plans = plan(views, self._regions, traffic, self._network, self._plans, PATIENCE_MS)
        weights = self._feedback.weights(one.engine for one in heard) if self._feedback is not None else None
        self._snapshots = {region: _publish(region, made, now_ms, weights) for region, made in self._plans.items()}

    def _mix(self) -> Mix:
        if not self._answers:
            return Mix()
        return Mix(
            prompt_tokens=self._prompt_tokens / self._requests, answer_tokens=self._answer_tokens / self._answers
        )


def _publish(region: str, made: Plan, now_ms: float, weights: Mapping[str, float] | None) -> Snapshot:
    return Snapshot(
        model=MODEL,
        region=region,
        version=round(now_ms),
        created_ms=round(now_ms),
        routes=made.routes if weights is None else reweighed(made.routes, weights),
        fallback=made.fallback,
        shed={str(priority): share for priority, share in made.shed.items()},
        demand=made.demand,
        shadow_prices=dict(made.prices),
        why=made.why,
    )
