"""From the engines of a model to the weights its traffic is shared by.

A first version: shares follow spare capacity. A GPU engine that is ready always comes before the CPU pool, which takes
all of the traffic when there is none, and a part of it when the GPU engines have more than they can do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from routing.penalties import weight_factor
from routing.profile import UNMEASURED, Profile, rate, relative_speeds
from wire.messages import EngineSignal, Route

QUEUE_TOLERANCE = 0.5
"""Waiting requests per slot that a pool may have before it counts as over capacity"""
MAX_FALLBACK = 0.5
"""Of a model's traffic, while a GPU engine is ready"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine as control knows it: what it said last, what it has shown it can do, and how far it is trusted."""

    signal: EngineSignal
    profile: Profile = UNMEASURED
    penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Shares of one model's traffic: they sum to 1, or there are none and `why` says what is missing."""

    routes: tuple[Route, ...]
    fallback: float
    why: str


def plan(engines: Iterable[EngineView]) -> Plan:
    """The shares for the engines of one model that were heard of lately, each by its primary shard."""
    heard = list(engines)
    ready = _primaries(heard)
    gpu = [view for view in ready if view.signal.fleet.pool == "gpu"]
    cpu = [view for view in ready if view.signal.fleet.pool != "gpu"]
    fallback, why = _fallback(gpu, cpu, heard)
    return Plan(
        routes=(*_shares(gpu, 1 - fallback), *_shares(cpu, fallback)),
        fallback=fallback,
        why=why,
    )


def headroom(signal: EngineSignal) -> float:
    """How much of an engine is free for the next request: 1 when idle, never 0, less the more requests wait."""
    slots = max(signal.slots, 0)
    free = max(slots - max(signal.running, 0), 0)
    return (free + 1) / (slots + 1 + max(signal.queued_requests, 0))


def _primaries(engines: Sequence[EngineView]) -> list[EngineView]:
    """The ready engines that own a shard. Of two that claim one as their primary, the one heard later has it."""
    owners = {}
    for view in sorted(engines, key=lambda view: (view.signal.at_ms, view.signal.incarnation)):
        if view.signal.state == "ready" and view.signal.shards:
            owners[view.signal.fleet, view.signal.shards[0]] = view
    return [owners[place] for place in sorted(owners)]


def _fallback(gpu: list[EngineView], cpu: list[EngineView], heard: list[EngineView]) -> tuple[float, str]:
    """The CPU pool's share, and the reason for people."""
    if not gpu and not cpu:
        return 0.0, _nobody(heard)
    if not gpu:
        return 1.0, "the CPU pool serves: no GPU engine is ready"
    share = _overflow(gpu) if any(view.signal.running < view.signal.slots for view in cpu) else 0.0
    if share:
        return share, f"the GPU engines are over capacity: the CPU pool takes {share:.0%}"
    return 0.0, "the GPU engines serve"


def _overflow(gpu: list[EngineView]) -> float:
    """The share of the GPU engines' requests that waits beyond what may wait."""
    queued = sum(max(view.signal.queued_requests, 0) for view in gpu)
    running = sum(max(view.signal.running, 0) for view in gpu)
    beyond = queued - QUEUE_TOLERANCE * sum(max(view.signal.slots, 0) for view in gpu)
    return min(beyond / (queued + running), MAX_FALLBACK) if beyond > 0 else 0.0


def _nobody(heard: list[EngineView]) -> str:
    if not heard:
        return "no engine has been heard of lately"
    states = Counter(view.signal.state for view in heard)
    return "no engine is ready: " + ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _shares(engines: list[EngineView], share: float) -> list[Route]:
    """One pool's routes; their weights sum to `share`."""
    if not engines or share <= 0:
        return []
    speeds = relative_speeds(view.profile for view in engines)
    raw = [
        speed * headroom(view.signal) * weight_factor(view.penalty) for speed, view in zip(speeds, engines, strict=True)
    ]
    total = sum(raw)
    return [_route(view, share * weight / total) for view, weight in zip(engines, raw, strict=True)]


def _route(view: EngineView, weight: float) -> Route:
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
        penalty=view.penalty,
    )
