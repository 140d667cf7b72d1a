"""Which shard a request goes to. Pure: everything known is passed in, and the same input gives the same choice.

1. A snapshot's weights say how the traffic is shared: a draw by weight, keyed by the request id. An engine that holds
   clearly more than its share already is passed over for another one drawn. So neither one stale snapshot nor sixteen
   ingresses that hold the same one make a herd, and a burst is levelled before control has heard of it.
2. The older the snapshot, the more equal the weights and the more draws: no cliff, at the end the least load wins.
3. Without a snapshot: murmur3(model + request id) mod N.
4. A shard that is excluded (it was tried) leaves the draw; what is drawn instead is the backup.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import mmh3

from routing.errors import BadSnapshot
from wire.fleet import Fleet
from wire.messages import EngineSignal, Snapshot

FRESH_MS = 3_000
"""A snapshot up to this age is followed as it is"""
STALE_MS = 30_000
"""From this age on its weights mean nothing any more"""
SILENT_MS = 3_000
"""An engine that is heard this much less recently than another is taken to be gone"""

CLEARLY = 1.25
"""How many times its share of the requests an engine may hold before it is passed over: less is noise"""

Shard = tuple[Fleet, int]
Reason = Literal["weighted", "local", "backup", "hashed"]
"""by a snapshot's weights · by local load, the snapshot being stale · another one failed · without any knowledge"""
_NONE: Mapping[Shard, int] = {}


class Candidate(NamedTuple):
    """A shard that could serve the request."""

    fleet: Fleet
    shard: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The shard a request goes to, and why."""

    fleet: Fleet
    shard: int
    reason: Reason


class _Option(NamedTuple):
    """A candidate that may be chosen, the weight it has and the last that was heard of its engine."""

    candidate: Candidate
    weight: float
    signal: EngineSignal | None


def choose(
    *,
    request_id: str,
    model: str,
    candidates: Sequence[Candidate],
    snapshot: Snapshot | None,
    now_ms: int,
    in_flight: Mapping[Shard, int],
    signals: Mapping[Shard, EngineSignal],
    exclude: frozenset[Shard] = frozenset(),
    unseen: Mapping[Shard, int] = _NONE,
) -> Choice | None:
    """The shard for a request; None if there is no candidate that isn't excluded.

    `candidates`: every shard of every fleet that may serve it. `signals`: an engine's latest signal by its primary
    shard. `in_flight`: this ingress's own unended attempts. `unseen`: those of them too young to be in the signals.
    A snapshot with a weight that is negative or no number counts as none.
    """
    usable = [c for c in candidates if c not in exclude] if exclude else candidates
    if not usable:
        return None
    draw = _Draw(request_id, model)
    if snapshot is not None and _sound(snapshot):
        known = _Known(in_flight, signals, unseen)
        if options := _routed(snapshot, usable, signals):
            relax = relaxation(now_ms - snapshot.created_ms)
            reason: Reason = "backup" if exclude else "local" if relax == 1 else "weighted"
            return Choice(*_weighted(_one_pool(options, draw), relax, draw, known), reason)
        if options := _heard(usable, signals):
            return Choice(*_weighted(options, 1.0, draw, known), "backup")
    return Choice(*_hashed(candidates, exclude, draw), "hashed")


def check(snapshot: Snapshot) -> None:
    """BadSnapshot unless its weights are finite, non-negative and sum to 1 (or there are no routes)."""
    if not _sound(snapshot):
        raise BadSnapshot(f"the snapshot of {snapshot.model!r} holds a weight that is negative or no number")
    if snapshot.routes and abs(sum(route.weight for route in snapshot.routes) - 1) > 1e-6:
        raise BadSnapshot(f"the weights of the snapshot of {snapshot.model!r} don't sum to 1")


def relaxation(age_ms: int) -> float:
    """How far a snapshot of this age is given up: 0 = followed as it is, 1 = not at all."""
    return min(max((age_ms - FRESH_MS) / (STALE_MS - FRESH_MS), 0.0), 1.0)


def _sound(snapshot: Snapshot) -> bool:
    return all(0 <= route.weight < math.inf for route in snapshot.routes)


def _routed(snapshot: Snapshot, usable: Iterable[Candidate], signals: Mapping[Shard, EngineSignal]) -> list[_Option]:
    """The routes that may be taken: weighted, among the candidates, and as far as known ready and not silent."""
    allowed: dict[Shard, Candidate] = {candidate: candidate for candidate in usable}
    options = []
    for route in snapshot.routes:
        candidate = allowed.get((route.fleet, route.shard))
        if candidate is not None and route.weight > 0:
            options.append(_Option(candidate, route.weight, signals.get(candidate)))
    return _living(options)


def _heard(usable: Iterable[Candidate], signals: Mapping[Shard, EngineSignal]) -> list[_Option]:
    """The candidates whose own signals say that they are ready, whatever the snapshot thinks of them."""
    return _living(_Option(c, 1.0, signals[c]) for c in usable if c in signals)


def _living(options: Iterable[_Option]) -> list[_Option]:
    """Without those whose own signal says that they aren't ready, or that fell silent while others were heard.

    Silence is judged against the latest signal, not the clock: when all are silent, it's the log that is.
    """
    ready = [option for option in options if option.signal is None or option.signal.state == "ready"]
    latest_ms = max((option.signal.at_ms for option in ready if option.signal is not None), default=0)
    return [o for o in ready if o.signal is None or latest_ms - o.signal.at_ms <= SILENT_MS]


def _one_pool(options: list[_Option], draw: _Draw) -> list[_Option]:
    """The options of one pool, drawn by weight: how much a pool gets is the snapshot's to say, not local load's."""
    pool = options[draw.pick([option.weight for option in options], 0)].candidate.fleet.pool
    return [option for option in options if option.candidate.fleet.pool == pool]


def _weighted(options: list[_Option], relax: float, draw: _Draw, known: _Known) -> Candidate:
    """Draw one by weight. If it holds clearly more than its weight's share of the requests that are running, the least
    burdened of it and one other wins; with `relax` the weights are ever more equal and the others ever more."""
    requests = known.requests(options)
    if relax == 1:
        return options[_least(requests, known.slots(options), draw)].candidate
    total = sum(option.weight for option in options)
    weights = [(1 - relax) * option.weight / total + relax / len(options) for option in options]
    chosen = draw.pick(weights, 1)
    if len(options) == 1 or requests[chosen] <= (sum(requests) + 1) * weights[chosen] * CLEARLY:
        return options[chosen].candidate
    others = [0.0 if n == chosen else weight for n, weight in enumerate(weights)]
    drawn = [chosen, *(draw.pick(others, 2 + n) for n in range(1 + round(relax * len(options))))]
    return options[min(drawn, key=lambda n: (requests[n] + 1) / weights[n])].candidate


def _least(requests: list[float], slots: list[float], draw: _Draw) -> int:
    """The index with the fewest requests per slot, the new one included; ties are broken by the request id."""
    loads = [(waiting + 1) / places for waiting, places in zip(requests, slots, strict=True)]
    tied = [n for n, load in enumerate(loads) if load == min(loads)]
    return tied[draw.number % len(tied)]


def _hashed(candidates: Sequence[Candidate], exclude: frozenset[Shard], draw: _Draw) -> Candidate:
    """murmur3(model + request id) mod N in a stable order; an excluded shard's requests go to the next one."""
    order = sorted(candidates)
    start = draw.number % len(order)
    return next(c for c in order[start:] + order[:start] if c not in exclude)


class _Draw:
    """Numbers that follow from the request alone, so that a decision can be replayed."""

    def __init__(self, request_id: str, model: str) -> None:
        key = (model + request_id).encode("utf-8", "surrogatepass")
        self.number = int(mmh3.hash(key, signed=False))
        self._first, step = map(int, mmh3.hash64(key, seed=1, signed=False))
        self._step = step | 1

    def pick(self, weights: list[float], n: int) -> int:
        """An index, with its weight's share of probability; another `n`, another draw."""
        table = list(accumulate(weights))
        share = (self._first + n * self._step) % 2**64 / 2**64
        return min(bisect(table, share * table[-1]), len(table) - 1)


@dataclass(frozen=True, slots=True)
class _Known:
    """What this ingress knows of load."""

    in_flight: Mapping[Shard, int]
    signals: Mapping[Shard, EngineSignal]
    unseen: Mapping[Shard, int]

    def requests(self, options: Sequence[_Option]) -> list[float]:
        """Requests at each engine, by its signal and this ingress's own sends. Unknown isn't zero: it is the mean of
        what is known, and at least this ingress's own."""
        told = [self._told(option) for option in options]
        mean = _mean([count for count in told if count is not None], 0.0)
        return [
            max(mean, self._own(option.candidate)) if count is None else count
            for count, option in zip(told, options, strict=True)
        ]

    def slots(self, options: Sequence[_Option]) -> list[float]:
        """Requests that each runs at once; where that isn't known, the mean of what is."""
        told = [None if option.signal is None else max(option.signal.slots, 1) for option in options]
        mean = _mean([count for count in told if count is not None], 1.0)
        return [mean if count is None else count for count in told]

    def _told(self, option: _Option) -> int | None:
        signal = option.signal
        if signal is None:
            return None
        requests = signal.queued_requests + signal.running
        if self.unseen:
            requests += self.unseen.get(option.candidate, 0)
        own = self._own(option.candidate)
        return requests if requests > own else own

    def _own(self, candidate: Candidate) -> int:
        return self.in_flight.get(candidate, 0)


def _mean(values: list[int], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
