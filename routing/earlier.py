"""The earlier design, kept to be chosen and compared: weighted consistent hashing on weights that a feedback loop sets.

Control smooths each engine's signals (an exponentially weighted moving average), makes one number of them, and moves
the engine's weight by how much better or worse than the average it is: proportionally, by the sum of past differences
and by their change, like a PID controller. An ingress filters what is eligible and hashes the request onto what is
left, by weight.

What is known of it: it needs no model and "just works"; but one number can't say why, load is uneven on mixed hardware,
and it oscillates: an engine that was relieved looks free, and gets everything back. docs/benchmarks.md shows that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import mmh3
import msgspec

from routing import sketch
from routing.board import Candidate, Mask
from routing.policy import Choice, Draw, Plan, Policy, Query, Reason
from wire.messages import EngineSignal, Route

SMOOTHING = 0.3
"""What a signal counts against all before it: a few seconds of them"""
PROPORTIONAL, INTEGRAL, DERIVATIVE = 0.3, 0.05, 0.1
"""Gains a round: a quarter of what would make it swing for ever where a weight takes effect at once"""
LEAST, MOST = 0.05, 20.0
"""A weight beside the average of 1: never nothing, or an engine could not show that it recovered"""
KEY_LINKS = 4
"""Of the prefix chain that a request is hashed by: its first thousand characters, beyond what all prompts share"""
MOST_SUM = 5.0
"""Of past differences: beyond it they wind up, and swing back for as long"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One engine's place in the feedback loop."""

    score: float | None = None
    """smoothed, the less the better; None before the first signal"""
    weight: float = 1.0
    total: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class Feedback:
    """The controller: `heard` each signal, `weights` once a round."""

    _loops: dict[str, Loop] = field(default_factory=dict)

    def heard(self, signal: EngineSignal) -> None:
        """Smooth a signal into its engine's score."""
        loop, now = self._loops.get(signal.engine, Loop()), score(signal)
        smooth = now if loop.score is None else loop.score + SMOOTHING * (now - loop.score)
        self._loops[signal.engine] = Loop(score=smooth, weight=loop.weight, total=loop.total, last=loop.last)

    def weights(self, engines: Iterable[str]) -> dict[str, float]:
        """The weights of these engines after one more round; they sum to 1. Others are forgotten."""
        loops = {engine: self._loops.get(engine, Loop()) for engine in engines}
        scores = [loop.score for loop in loops.values() if loop.score is not None]
        mean = sum(scores) / len(scores) if scores else 0.0
        self._loops = {engine: _round(loop, mean) for engine, loop in loops.items()}
        total = sum(loop.weight for loop in self._loops.values())
        return {engine: loop.weight / total for engine, loop in self._loops.items()}


def score(signal: EngineSignal) -> float:
    """How badly an engine does: its load, its times and its errors as one number, 0 for an idle one."""
    slots = max(signal.slots, 1)
    load = (max(signal.running, 0) + 2 * max(signal.queued_requests, 0)) / slots
    ttft_s, tbt_ms = (sketch.mean(signal.ttft) or 0.0) / 1_000, sketch.mean(signal.tbt) or 0.0
    errors = max(signal.errors, 0) / max(signal.finished, signal.errors, 1)
    return load + ttft_s + tbt_ms / 25 + 5 * errors


class EarlierPolicy(Policy):
    """The data plane: eligibility as ever, and then the hash alone."""

    def _least(
        self, query: Query, plan: Plan, able: Mask, relax: float, draw: Draw, now_ms: float, reason: Reason | None
    ) -> Choice:
        key = str(query.prefix_chain[:KEY_LINKS][-1]) if query.prefix_chain else query.request_id
        weights = {plan.candidates[n]: plan.weights.item(n) for n in able.nonzero()[0].tolist()}
        fleet, shard = hashed(weights, key)
        return Choice(fleet, shard, reason or "weight")


def hashed(weights: Mapping[Candidate, float], key: str) -> Candidate:
    """Weighted rendezvous hashing: the same key goes to the same candidate, and a weight that changes moves only as
    many keys as it must (Thaler and Ravishankar 1998; the logarithm makes it weighted). There must be a candidate."""

    def rank(candidate: Candidate) -> float:
        name = f"{candidate.fleet.name}/{candidate.shard}\0{key}".encode("utf-8", "surrogatepass")
        drawn = (mmh3.hash64(name, signed=False)[0] + 1) / (2**64 + 1)
        return -weights[candidate] / math.log(drawn)

    return max(sorted(weights), key=rank)


def reweighed(routes: Iterable[Route], weights: Mapping[str, float]) -> tuple[Route, ...]:
    """Routes with the feedback's weights; each region's pool keeps the share that it has."""
    routes = list(routes)
    has: dict[tuple[str, str], float] = defaultdict(float)
    gets: dict[tuple[str, str], float] = defaultdict(float)
    for route in routes:
        has[route.fleet.region, route.fleet.pool] += route.weight
        gets[route.fleet.region, route.fleet.pool] += weights[route.engine]
    return tuple(
        msgspec.structs.replace(
            route, weight=has[group] * weights[route.engine] / gets[group] if gets[group] else route.weight
        )
        for route in routes
        for group in [(route.fleet.region, route.fleet.pool)]
    )


def _round(loop: Loop, mean: float) -> Loop:
    """Better than the average raises the weight, worse lowers it."""
    if loop.score is None or mean <= 0:
        return Loop(score=loop.score, weight=loop.weight)
    better = min(max((mean - loop.score) / mean, -1.0), 1.0)
    total = min(max(loop.total + better, -MOST_SUM), MOST_SUM)
    change = PROPORTIONAL * better + INTEGRAL * total + DERIVATIVE * (better - loop.last)
    weight = min(max(loop.weight * math.exp(change), LEAST), MOST)
    return Loop(score=loop.score, weight=weight, total=total, last=better)
