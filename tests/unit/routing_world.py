"""Fleets, engines and snapshots for routing's tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from routing.policy import Candidate, Choice, Shard, choose
from wire.fleet import Fleet
from wire.messages import EngineSignal, Route, Snapshot

NOW_MS = 1_700_000_000_000
MODEL = "Org/Model-1B"


def fleet(pool: str = "gpu", version: str = "1", region: str = "local") -> Fleet:
    return Fleet(region, pool, "org-model-1b", version, "sim")


def candidates(count: int, pool: str = "gpu") -> list[Candidate]:
    return [Candidate(fleet(pool), shard) for shard in range(count)]


def signal(shard: int = 0, pool: str = "gpu", **fields: Any) -> EngineSignal:
    """A ready, idle engine of 32 slots that owns one shard."""
    defaults: dict[str, Any] = {
        "engine": f"{pool}-{shard}",
        "incarnation": "a",
        "fleet": fleet(pool),
        "shards": (shard,),
        "state": "ready",
        "model": MODEL,
        "fingerprint": "sim",
        "at_ms": NOW_MS,
        "queued_requests": 0,
        "queued_tokens": 0,
        "running": 0,
        "slots": 32,
    }
    return EngineSignal(**(defaults | fields))


def by_shard(*signals: EngineSignal) -> dict[Shard, EngineSignal]:
    return {(s.fleet, s.shards[0]): s for s in signals}


def snapshot(weights: Mapping[Candidate, float], age_ms: int = 0) -> Snapshot:
    routes = tuple(
        Route(fleet=c.fleet, shard=c.shard, engine=f"{c.fleet.pool}-{c.shard}", weight=w) for c, w in weights.items()
    )
    return Snapshot(model=MODEL, region="local", version=7, created_ms=NOW_MS - age_ms, routes=routes)


def equal(places: Iterable[Candidate], age_ms: int = 0) -> Snapshot:
    places = list(places)
    return snapshot(dict.fromkeys(places, 1 / len(places)), age_ms)


def pick(number: int | str, places: list[Candidate], **known: Any) -> Choice | None:
    """The choice for a request named by a number."""
    defaults: dict[str, Any] = {
        "snapshot": None,
        "now_ms": NOW_MS,
        "in_flight": {},
        "signals": {},
    }
    return choose(request_id=f"request-{number}", model=MODEL, candidates=places, **(defaults | known))
