"""Fleets, engines, snapshots and boards for routing's tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from routing.board import Board, Candidate, Shard
from routing.policy import Choice, Policy, Query
from wire.fleet import Fleet
from wire.messages import EngineSignal, Route, Snapshot, StepCost

NOW_MS = 1_700_000_000_000
MODEL = "Org/Model-1B"
STEP = StepCost(prefill_fixed_ms=10.0, prefill_token_ms=0.01, decode_ms=10.0, decode_token_ms=2e-5, piece_tokens=8_000)


def fleet(pool: str = "gpu", version: str = "1", region: str = "local") -> Fleet:
    return Fleet(region, pool, "org-model-1b", version, "sim")


def candidates(count: int, pool: str = "gpu", region: str = "local") -> tuple[Candidate, ...]:
    return tuple(Candidate(fleet(pool, region=region), shard) for shard in range(count))


def signal(shard: int = 0, pool: str = "gpu", region: str = "local", **fields: Any) -> EngineSignal:
    """A ready, idle engine of 32 slots that owns one shard."""
    defaults: dict[str, Any] = {
        "engine": f"{pool}-{shard}" if region == "local" else f"{region}-{pool}-{shard}",
        "incarnation": "a",
        "fleet": fleet(pool, region=region),
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


def snapshot(weights: Mapping[Candidate, float], age_ms: int = 0) -> Snapshot:
    routes = tuple(
        Route(fleet=c.fleet, shard=c.shard, engine=f"{c.fleet.pool}-{c.shard}", weight=w) for c, w in weights.items()
    )
    return Snapshot(model=MODEL, region="local", version=7, created_ms=NOW_MS - age_ms, routes=routes)


def equal(places: Iterable[Candidate], age_ms: int = 0) -> Snapshot:
    places = list(places)
    return snapshot(dict.fromkeys(places, 1 / len(places)), age_ms)


class Ingress:
    """A policy and its board: `pick` asks, `send` asks and sends."""

    def __init__(self, *signals: EngineSignal, snapshot: Snapshot | None = None, **board: Any) -> None:
        self.board = Board(**({"travel_ms": 1.0} | board))
        self.policy = Policy(self.board)
        self.policy.follow(snapshot)
        self.hear(*signals)

    def hear(self, *signals: EngineSignal) -> None:
        for one in signals:
            self.board.heard(one)

    def pick(
        self,
        name: int | str,
        places: tuple[Candidate, ...],
        *,
        now_ms: float = NOW_MS,
        exclude: Iterable[Shard] = (),
        **query: Any,
    ) -> Choice | None:
        """The choice for a request named so."""
        asked = Query(request_id=f"request-{name}", model=MODEL, candidates=places, **query)
        return self.policy.choose(asked, now_ms, frozenset(exclude))

    def send(self, name: int | str, places: tuple[Candidate, ...], *, now_ms: float = NOW_MS, **query: Any) -> Choice:
        """The choice for a request, which goes there."""
        choice = self.pick(name, places, now_ms=now_ms, **query)
        assert choice is not None
        chain, tokens = query.get("prefix_chain", ()), query.get("prompt_tokens", 1)
        self.board.sent((f"request-{name}", 1), (choice.fleet, choice.shard), tokens, chain, now_ms)
        return choice

    def own(self, place: Shard, count: int, now_ms: float = NOW_MS) -> None:
        """So many requests are in flight to a shard."""
        for n in range(count):
            self.board.sent((f"{place}-{n}", 1), place, 1, (), now_ms)
