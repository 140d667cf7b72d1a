"""Where a request goes: what is known of engines and weights, put to `routing.policy`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import mmh3

from ingress.dispatches import Siblings
from ingress.endings import shed
from ingress.life import Target
from ingress.metrics import Metrics
from routing.budget import RetryBudget
from routing.errors import BadSnapshot
from routing.flights import Flights, Shard
from routing.policy import check, choose
from wire.bus import Record
from wire.clock import Clock
from wire.messages import DemandSignal, EngineSignal, Request, Snapshot

log = logging.getLogger(__name__)
ENGINE_HEARD_MS = 10_000
"""a ready engine not heard for longer is no reason to say that this ingress is ready"""


class Weights:
    """The snapshots of this region, by model; unusable ones are left out."""

    def __init__(self, region: str) -> None:
        self._prefix = f"{region}/"
        self._snapshots: dict[str, Snapshot] = {}

    def changed(self, key: str, snapshot: Snapshot | None) -> None:
        """Take a change of the weights topic."""
        if not key.startswith(self._prefix):
            return
        model = key.removeprefix(self._prefix)
        if snapshot is None:
            self._snapshots.pop(model, None)
            return
        try:
            check(snapshot)
        except BadSnapshot as exc:
            log.warning("%s; the one before it stays in use", exc)
            return
        self._snapshots[model] = snapshot

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return self._snapshots


class Router:
    """Chooses targets and keeps count of what is in flight to them."""

    def __init__(self, weights: Weights, siblings: Siblings, metrics: Metrics, clock: Clock) -> None:
        self._weights = weights
        self._siblings = siblings
        self._metrics = metrics
        self._clock = clock
        self._signals: dict[Shard, EngineSignal] = {}
        self._budget = RetryBudget(now_ms=clock.monotonic_ms())
        self.flights = Flights()

    def heard(self, signal: EngineSignal | DemandSignal, record: Record) -> None:
        """Take a record of the signals topic: an engine's latest word, by its primary shard."""
        if not isinstance(signal, EngineSignal) or not signal.shards:
            return
        primary = (signal.fleet, signal.shards[0])
        for shard, known in list(self._signals.items()):
            if known.engine == signal.engine and shard != primary:
                del self._signals[shard]
        self._signals[primary] = signal

    def first(self, request: Request, candidates: Sequence[Target]) -> Target | None:
        """The first attempt's target. ApiError 503 if the snapshot says to shed this request."""
        snapshot = self._weights.snapshots.get(request.model)
        if snapshot is not None:
            share = snapshot.shed.get(str(request.priority), 0.0)
            if share > 0 and mmh3.hash(request.request_id, seed=2, signed=False) / 2**32 < share:
                self._metrics.shed.labels(request.model).inc()
                raise shed()
        self._budget.first_attempt(self._clock.monotonic_ms())
        return self._choose(request, candidates, frozenset())

    def elsewhere(self, request: Request, candidates: Sequence[Target], tried: frozenset[Target]) -> Target | None:
        """Another target than those tried, if there is one and the retry budget allows it."""
        target = self._choose(request, candidates, tried)
        if target is None:
            return None
        if not self._budget.try_retry(self._clock.monotonic_ms()):
            self._metrics.retries_refused.inc()
            return None
        self._metrics.retries.inc()
        return target

    def engine_known(self) -> bool:
        """Whether any engine is known that could serve: a fresh signal of a ready one, or a route."""
        oldest_ms = self._clock.now_ms() - ENGINE_HEARD_MS
        return any(s.state == "ready" and s.at_ms >= oldest_ms for s in self._signals.values()) or any(
            snapshot.routes and snapshot.created_ms >= oldest_ms for snapshot in self._weights.snapshots.values()
        )

    def _choose(self, request: Request, candidates: Sequence[Target], tried: frozenset[Target]) -> Target | None:
        unseen = self.flights.unseen(self._signals)
        self._siblings.add_unseen(unseen, self._signals)
        choice = choose(
            request_id=request.request_id,
            model=request.model,
            candidates=candidates,
            snapshot=self._weights.snapshots.get(request.model),
            now_ms=self._clock.now_ms(),
            in_flight=self.flights.counts,
            signals=self._signals,
            exclude=tried,
            unseen=unseen,
        )
        return None if choice is None else Target(choice.fleet, choice.shard)
