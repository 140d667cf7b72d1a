"""Signals in, each model's snapshot out: pure folds over the last seconds.

Silence says something about an engine only while the log works. So time is counted here by what is heard from anyone:
while nothing comes, it stands still, and a broker that was away makes no engine look dead. (Each ingress signals once a
second, so there is always somebody to hear.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from aggregator.served import Served
from aggregator.traffic import Asked
from routing import sketch
from routing.earlier import Feedback, reweighed
from routing.penalties import Penalty, grown, penalty_at
from routing.plan import NO_NETWORK, EngineView, Network, Plan, plan
from routing.profile import UNMEASURED, Profile, learn
from routing.shed import PATIENCE_MS
from wire.messages import DemandSignal, EngineSignal, Model, Signal, Sketch, Snapshot

SILENT_MS = 2_500
"""An engine that says nothing for this long gets no more traffic; it signals twice a second"""
WINDOW_MS = 10_000
"""TTFT, TBT and errors are those of this many last milliseconds"""
REGRET_MEMORY_MS = 30_000
"""Regret is averaged over about so long: engines end a few requests a second, so that from one to the next it jumps"""
_BUCKET_MS = 1_000
_GAP_MS = 1_500
"""The most that the time counted here moves from one signal to the next"""


@dataclass(slots=True)
class Engine:
    """One life of an engine."""

    signal: EngineSignal
    heard_ms: float
    """when it was last heard, in the time counted here"""
    profile: Profile = UNMEASURED


@dataclass(slots=True)
class Bucket:
    """What a model's engines and the ingresses that use them saw in one second."""

    ttft: Sketch = field(default_factory=sketch.empty)
    tbt: Sketch = field(default_factory=sketch.empty)
    ended: int = 0
    bad: int = 0

    def add_engine(self, signal: EngineSignal) -> None:
        self.ttft = sketch.merge((self.ttft, signal.ttft))
        self.tbt = sketch.merge((self.tbt, signal.tbt))
        self.ended += max(signal.finished, signal.errors, 0)  # an engine's death is an error that ends no request
        self.bad += max(signal.errors, 0)

    def add_demand(self, signal: DemandSignal) -> None:
        self.ended += signal.failures
        self.bad += signal.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """How a model's traffic was really shared lately: as in its snapshots, but refused requests by region."""

    regret_ms: float | None
    swing: float | None
    refused_per_s: Mapping[str, float]


class Windows:
    """Everything control knows. It is rebuilt from a few seconds of signals, so it is stored nowhere."""

    def __init__(
        self, network: Network = NO_NETWORK, feedback: Feedback | None = None, patience_ms: float = PATIENCE_MS
    ) -> None:
        """`feedback`: sets the engines' weights instead of the optimizer. `patience_ms`: as `routing.plan.plan`'s."""
        self._network = network
        self._patience_ms = patience_ms
        self._feedback = feedback
        self._asked = Asked()
        self._served = Served()
        self._regrets: dict[str, tuple[float, float]] = {}
        """by model, smoothed, and when that was"""
        self._weights: dict[str, float] = {}
        """by engine: the feedback's"""
        self._plans: dict[str, dict[str, Plan]] = {}
        """by model and region, the latest"""
        self._engines: dict[tuple[str, str], Engine] = {}
        self._penalties: dict[str, Penalty] = {}
        self._buckets: dict[str, dict[int, Bucket]] = {}
        self._models: set[str] = set()
        self._rollouts: dict[str, dict[str, float]] = {}
        """by model and version, the share of the traffic"""
        self._time_ms = 0.0
        self._heard_at_ms: int | None = None
        self._offset = -1

    def hear(self, signal: Signal, offset: int, now_ms: int) -> None:
        """Take a signal of the log. BadSketch if it holds one that can't be read; then nothing of it is taken."""
        if isinstance(signal, EngineSignal):
            sketch.check(signal.ttft)
            sketch.check(signal.tbt)
        self._pass_time(now_ms)
        self._offset = offset
        if isinstance(signal, EngineSignal):
            self._hear_engine(signal, now_ms)
            return
        self._asked.hear(signal, self._time_ms)
        if signal.failures > 0:
            self._bucket(signal.model, now_ms).add_demand(signal)

    def rolled_out(self, name: str, model: Model | None) -> None:
        """The catalogue says which versions of a model get how much of its traffic."""
        total = sum(version.share for version in model.versions) if model is not None else 0.0
        if model is None or total <= 0:
            self._rollouts.pop(name, None)
        else:
            self._rollouts[name] = {version.version: version.share / total for version in model.versions}

    def listens(self, now_ms: int) -> bool:
        """Whether signals come in, and have for long enough to have heard every engine that lives."""
        return self._heard_at_ms is not None and now_ms - self._heard_at_ms < SILENT_MS and self._time_ms >= _GAP_MS

    def engines(self) -> list[Engine]:
        """The lives of engines that aren't silent; those that are, are forgotten."""
        self._engines = {
            name: engine for name, engine in self._engines.items() if self._time_ms - engine.heard_ms <= SILENT_MS
        }
        return list(self._engines.values())

    def snapshots(self, regions: Iterable[str], now_ms: int) -> list[Snapshot]:
        """A snapshot for each model ever heard of and each region."""
        engines, regions = self.engines(), list(regions)
        self._forget(now_ms)
        self._asked.forget(self._time_ms)
        if self._feedback is not None:
            self._weights = self._feedback.weights(engine.signal.engine for engine in engines)
        return [snapshot for model in sorted(self._models) for snapshot in self._of(model, regions, engines, now_ms)]

    def _of(self, model: str, regions: list[str], engines: list[Engine], now_ms: int) -> Iterable[Snapshot]:
        """One model's snapshots."""
        mine = [engine for engine in engines if engine.signal.model == model]
        views = [self._view(engine, now_ms) for engine in mine]
        traffic, before = self._asked.of(model, self._time_ms), self._plans.get(model)
        network = replace(self._network, rollout=self._rollouts.get(model, {}))
        plans = self._plans[model] = plan(views, regions, traffic, network, before, self._patience_ms)
        ready = [engine.signal.engine for engine in mine if engine.signal.state == "ready"]
        swing = self._served.swing(model, ready, self._time_ms)
        regret = self._regret(model, next((made.regret for made in plans.values()), None))
        shared = Shared(regret_ms=self._lost_ms(model, regret), swing=swing, refused_per_s=traffic.refused)
        return [self._snapshot(model, region, made, shared, mine, now_ms) for region, made in plans.items()]

    def _regret(self, model: str, now: float | None) -> float | None:
        """Over REGRET_MEMORY_MS; None where it isn't known now."""
        if now is None:
            self._regrets.pop(model, None)
            return None
        before, at_ms = self._regrets.get(model, (now, self._time_ms))
        smooth = before + (now - before) * -math.expm1((at_ms - self._time_ms) / REGRET_MEMORY_MS)
        self._regrets[model] = smooth, self._time_ms
        return smooth

    def _lost_ms(self, model: str, regret: float | None) -> float | None:
        """The same part of the time that a request took lately, on average, in the engines."""
        seen = self._buckets.get(model, {}).values()
        begun = sum(bucket.ttft.total for bucket in seen)
        if regret is None or not begun:
            return None
        return regret * sum(bucket.ttft.sum_ms + bucket.tbt.sum_ms for bucket in seen) / begun

    def _snapshot(
        self, model: str, region: str, made: Plan, shared: Shared, mine: list[Engine], now_ms: int
    ) -> Snapshot:
        seen = list(self._buckets.get(model, {}).values())
        ended = sum(bucket.ended for bucket in seen)
        return Snapshot(
            model=model,
            region=region,
            version=self._offset,
            created_ms=now_ms,
            routes=made.routes if self._feedback is None else reweighed(made.routes, self._weights),
            fallback=made.fallback,
            shed={str(priority): share for priority, share in made.shed.items()},
            demand=made.demand,
            refused_per_s=shared.refused_per_s.get(region, 0.0),
            shadow_prices=dict(made.prices),
            ttft=sketch.merge(bucket.ttft for bucket in seen),
            tbt=sketch.merge(bucket.tbt for bucket in seen),
            queued_requests=sum(max(engine.signal.queued_requests, 0) for engine in mine),
            error_rate=sum(bucket.bad for bucket in seen) / ended if ended else 0.0,
            why=made.why,
            regret_ms=shared.regret_ms,
            swing=shared.swing,
        )

    def _view(self, engine: Engine, now_ms: int) -> EngineView:
        penalty = self._penalties.get(engine.signal.engine, Penalty())
        return EngineView(signal=engine.signal, profile=engine.profile, penalty=penalty_at(penalty, now_ms))

    def _hear_engine(self, signal: EngineSignal, now_ms: int) -> None:
        lives = [e.signal for e in self._engines.values() if e.signal.engine == signal.engine]
        if any(life.incarnation > signal.incarnation and life.fleet == signal.fleet for life in lives):
            return  # a late word of an earlier life
        for life in lives:
            if life.incarnation < signal.incarnation and life.fleet == signal.fleet:
                del self._engines[life.engine, life.incarnation]
        self._models.add(signal.model)
        name = (signal.engine, signal.incarnation)
        before = self._engines.get(name)
        profile = learn(before.profile if before is not None else UNMEASURED, signal)
        self._engines[name] = Engine(signal, self._time_ms, profile)
        self._bucket(signal.model, now_ms).add_engine(signal)
        self._served.add(signal.model, signal.engine, signal.finished, self._time_ms)
        if self._feedback is not None:
            self._feedback.heard(signal)
        if signal.errors > 0:
            blame = signal.errors / max(signal.finished, signal.errors)
            self._penalties[signal.engine] = grown(self._penalties.get(signal.engine, Penalty()), blame, now_ms)

    def _bucket(self, model: str, now_ms: int) -> Bucket:
        return self._buckets.setdefault(model, {}).setdefault(now_ms // _BUCKET_MS, Bucket())

    def _pass_time(self, now_ms: int) -> None:
        if self._heard_at_ms is not None:
            self._time_ms += min(max(now_ms - self._heard_at_ms, 0), _GAP_MS)
        self._heard_at_ms = now_ms

    def _forget(self, now_ms: int) -> None:
        oldest = (now_ms - WINDOW_MS) // _BUCKET_MS
        for model, buckets in list(self._buckets.items()):
            self._buckets[model] = {second: bucket for second, bucket in buckets.items() if second > oldest}
            if not self._buckets[model]:
                del self._buckets[model]
        self._penalties = {
            name: penalty for name, penalty in self._penalties.items() if penalty_at(penalty, now_ms) > 0.01
        }
