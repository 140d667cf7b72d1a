"""`millstream status`: what runs, whether it is well, and what waits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from millstream import observe, probes
from millstream.kafka import broker
from millstream.observe import LOOK_BACK_MS, Backlog, Seen
from millstream.runfile import HOST, ChildRun, Run, alive
from millstream.stack import CLICKHOUSE, CONTROL, INGRESS, KAFKA, LEDGER, REGION, engine_of
from millstream.state import StateDir
from wire.clock import SystemClock
from wire.errors import BusError
from wire.fleet import Fleet
from wire.kafka import KafkaBus
from wire.messages import EngineSignal, Model, Snapshot

Health = Literal["ok", "starting", "down", "unwell"]
T = TypeVar("T")

FRESH_MS = 5_000
"""an engine that hasn't signalled for longer, or weights that are older, are stale"""
LEDGER_GROUP = "ledger"
_ASK_WITHIN_S = 8.0


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process."""

    name: str
    pid: int | None
    health: Health
    why: str
    """what is wrong; "" when nothing is"""
    uptime_s: float | None
    restarts: int
    log: str


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, by its latest signal."""

    name: str
    state: str
    shards: tuple[int, ...]
    running: int
    queued: int
    slots: int
    weight: float | None
    """the share of the model's new requests; None = in no snapshot"""
    restarts: int
    """of the engine's own process, by its worker"""
    age_ms: int


class RoutingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's traffic is shared, by control's latest snapshot."""

    model: str
    why: str
    demand_per_s: float | None
    """requests that come"""
    refused_per_s: float
    """of these"""
    regret_ms: float | None
    swing: float | None
    """both as in `Snapshot`"""
    age_ms: int


class BacklogStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Records that a consumer group hasn't dealt with yet."""

    name: str
    records: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `status` shows."""

    healthy: bool
    state: str
    base_url: str
    model: str
    uptime_s: float
    processes: tuple[ProcessStatus, ...]
    engines: tuple[EngineStatus, ...]
    routing: tuple[RoutingStatus, ...]
    queues: tuple[BacklogStatus, ...]
    """by fleet: requests that no worker has taken on"""
    ledger_lag: int | None
    """usage records not in the ledger yet; None while Kafka is away"""
    storage_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromLog:
    """What only the log can tell."""

    seen: Seen
    queues: tuple[Backlog, ...]
    ledger: Backlog


async def look(run: Run) -> Report:
    """Ask everything that runs how it is, at the same time."""
    clickhouse, unready, ledger, kafka, log = await asyncio.gather(
        probes.clickhouse_answers(run),
        probes.unready(run),
        probes.ledger_answers(run),
        broker.ready(f"{HOST}:{run.kafka_port}"),
        _in_time(_from_log(run)),
    )
    now_ms = time.time_ns() // 1_000_000
    wrong = {
        KAFKA: "" if kafka else "doesn't answer",
        CLICKHOUSE: "" if clickhouse else "doesn't answer",
        INGRESS: unready,
        LEDGER: "" if ledger else "doesn't answer",
        **({} if log is None else {CONTROL: _control_wrong(log.seen.snapshots, run, now_ms)}),
    }
    return report(run, log, wrong, storage(StateDir(Path(run.state_dir))), now_ms)


def report(run: Run, log: FromLog | None, wrong: dict[str, str], storage_bytes: dict[str, int], now_ms: int) -> Report:
    """What was found, put together. Healthy = everything runs, answers and is fresh. Pure but for `alive`."""
    engines = () if log is None else engine_statuses(log.seen.engines, log.seen.snapshots, now_ms)
    if log is not None:
        wrong = workers_wrong(run, engines) | wrong
    processes = tuple(process_status(child, wrong.get(child.name, ""), now_ms) for child in run.children)
    return Report(
        healthy=run.state == "ready" and bool(processes) and all(one.health == "ok" for one in processes),
        state=run.state,
        base_url=run.base_url,
        model=run.model,
        uptime_s=(now_ms - run.started_ms) / 1000,
        processes=processes,
        engines=engines,
        routing=() if log is None else routing_statuses(log.seen.snapshots, now_ms),
        queues=() if log is None else tuple(BacklogStatus(name=q.group, records=q.records) for q in log.queues),
        ledger_lag=None if log is None else log.ledger.records,
        storage_bytes=storage_bytes,
    )


def workers_wrong(run: Run, engines: Iterable[EngineStatus]) -> dict[str, str]:
    """What is wrong with each worker, by its engine's latest signal: of a frozen one there is soon none to read."""
    ages_ms = {engine.name: engine.age_ms for engine in engines}
    return {child.name: _silence(ages_ms.get(engine)) for child in run.children if (engine := _engine_of(child.name))}


def _engine_of(process: str) -> str | None:
    """The engine's name of a worker; None for another process."""
    number = process.removeprefix("worker-")
    return engine_of(int(number)) if number != process and number.isdecimal() else None


def _silence(age_ms: int | None) -> str:
    if age_ms is None:
        return f"no signal for more than {LOOK_BACK_MS / 1000:.0f} s"
    return f"no signal for {age_ms / 1000:.0f} s" if age_ms > FRESH_MS else ""


def process_status(child: ChildRun, wrong: str, now_ms: int) -> ProcessStatus:
    """A child's health: it lives, has been ready, and nothing is wrong with what it says."""
    lives = alive(child.pid, child.created_s)
    health: Health = "ok"
    if not lives:
        health, wrong = "down", f"not running ({child.state})"
    elif child.state != "ready":
        health, wrong = "starting", child.state
    elif wrong:
        health = "unwell"
    return ProcessStatus(
        name=child.name,
        pid=child.pid if lives else None,
        health=health,
        why=wrong,
        uptime_s=(now_ms - child.started_ms) / 1000 if lives and child.started_ms is not None else None,
        restarts=child.restarts,
        log=child.log,
    )


def engine_statuses(
    engines: dict[str, EngineSignal], snapshots: dict[str, Snapshot], now_ms: int
) -> tuple[EngineStatus, ...]:
    """Engines by name, with their share of the weights."""
    weights: dict[str, float] = {}
    for snapshot in snapshots.values():
        for route in snapshot.routes:
            weights[route.engine] = weights.get(route.engine, 0.0) + route.weight
    return tuple(
        EngineStatus(
            name=name,
            state=signal.state,
            shards=signal.shards,
            running=signal.running,
            queued=signal.queued_requests,
            slots=signal.slots,
            weight=weights.get(name),
            restarts=signal.restarts,
            age_ms=max(0, now_ms - signal.at_ms),
        )
        for name, signal in sorted(engines.items())
    )


def routing_statuses(snapshots: dict[str, Snapshot], now_ms: int) -> tuple[RoutingStatus, ...]:
    """Models by name."""
    return tuple(
        RoutingStatus(
            model=model,
            why=snapshot.why,
            demand_per_s=snapshot.demand,
            refused_per_s=snapshot.refused_per_s,
            regret_ms=snapshot.regret_ms,
            swing=snapshot.swing,
            age_ms=max(0, now_ms - snapshot.created_ms),
        )
        for model, snapshot in sorted(snapshots.items())
    )


def storage(state: StateDir) -> dict[str, int]:
    """Bytes on disk by part of the state directory; what goes away meanwhile counts as nothing."""
    parts = {"kafka": state.kafka, "clickhouse": state.clickhouse, "logs": state.logs}
    return {name: sum(map(_size, _files(part))) for name, part in parts.items()}


def _files(part: Path) -> Iterator[Path]:
    """All files below; `os.walk` passes over a directory that is gone when it gets there, as ClickHouse's tmp_… are."""
    for directory, _, names in os.walk(part):
        for name in names:
            yield Path(directory, name)


def _size(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512 if file.is_file() else 0  # Kafka's indexes are files with holes
    except OSError:
        return 0  # the log cleaner took it away just now


def _control_wrong(snapshots: dict[str, Snapshot], run: Run, now_ms: int) -> str:
    snapshot = snapshots.get(run.model)
    if snapshot is None:
        return "has published no weights"
    age_ms = now_ms - snapshot.created_ms
    return f"weights are {age_ms / 1000:.0f} s old" if age_ms > FRESH_MS else ""


async def _in_time(work: Awaitable[T]) -> T | None:
    try:
        return await asyncio.wait_for(work, _ASK_WITHIN_S)
    except (TimeoutError, BusError):
        return None


async def _from_log(run: Run) -> FromLog:
    bus = KafkaBus(run.settings().cluster, SystemClock())
    seen = await observe.look(bus, time.time_ns() // 1_000_000)
    return FromLog(
        seen=seen,
        queues=await observe.fleet_backlogs(bus, fleets(seen.models)),
        ledger=await observe.ledger_backlog(bus, LEDGER_GROUP),
    )


def fleets(models: dict[str, Model]) -> tuple[Fleet, ...]:
    """Every fleet of the catalogue in this region."""
    return tuple(
        Fleet(REGION, pool, model.slug, version.version, version.numerics)
        for model in models.values()
        for version in model.versions
        for pool in version.pools
        if REGION in version.regions
    )


def as_json(found: Report) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
