"""What status makes of what it finds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream import status_text
from millstream.observe import Backlog, Seen
from millstream.runfile import ChildRun, Run, created_s
from millstream.stack import simulated
from millstream.state import StateDir
from millstream.status import FRESH_MS, FromLog, as_json, fleets, report, storage
from millstream.table import table
from wire.messages import EngineSignal, Route, Snapshot

NOW_MS = 1_700_000_000_000
FLEET = simulated().fleet


def a_child(name: str = "worker-0", **changes: object) -> ChildRun:
    fields: dict[str, object] = {
        "name": name,
        "state": "ready",
        "log": "l",
        "pid": os.getpid(),
        "created_s": created_s(os.getpid()),
        "started_ms": NOW_MS - 90_000,
    }
    return ChildRun(**{**fields, **changes})  # type: ignore[arg-type]


def a_run(*children: ChildRun) -> Run:
    return Run(
        pid=1,
        created_s=0,
        state="ready",
        started_ms=NOW_MS - 100_000,
        port=1,
        kafka_port=2,
        clickhouse_port=3,
        ledger_port=4,
        region="local",
        model="simulated",
        engine_kind="simulated",
        state_dir="/s",
        versions={},
        slots=8,
        children=children,
    )


def from_log(signal_age_ms: int = 100) -> FromLog:
    signal = EngineSignal(
        engine="engine-0",
        incarnation="x",
        fleet=FLEET,
        shards=(0, 1),
        state="ready",
        model="simulated",
        fingerprint="sim",
        at_ms=NOW_MS - signal_age_ms,
        queued_requests=2,
        queued_tokens=20,
        running=3,
        slots=32,
    )
    route = Route(fleet=FLEET, shard=0, engine="engine-0", weight=0.75)
    snapshot = Snapshot(
        model="simulated",
        region="local",
        version=1,
        created_ms=NOW_MS,
        routes=(route, route),
        demand=3.0,
        refused_per_s=1.25,
        why="the GPU engines serve",
        regret_ms=12.0,
    )
    return FromLog(
        seen=Seen(engines={"engine-0": signal}, snapshots={"simulated": snapshot}),
        queues=(Backlog(group="workers.f", records=5),),
        ledger=Backlog(group="ledger", records=7),
    )


def test_all_is_well() -> None:
    found = report(a_run(a_child(), a_child("kafka")), from_log(), {"kafka": ""}, {"kafka": 10}, NOW_MS)
    assert found.healthy
    assert [one.health for one in found.processes] == ["ok", "ok"]
    assert found.processes[0].uptime_s == 90
    (engine,) = found.engines
    assert (engine.running, engine.queued, engine.slots, engine.weight) == (3, 2, 32, 1.5)
    assert found.queues[0].records == 5
    assert found.ledger_lag == 7
    shown = json.loads(as_json(found))
    assert shown["healthy"] is True
    assert (shown["routing"][0]["demand_per_s"], shown["routing"][0]["refused_per_s"]) == (3.0, 1.25)


def test_each_kind_of_trouble_is_named() -> None:
    children = (
        a_child("gone", pid=None),
        a_child("another", created_s=5.0),
        a_child("slow", state="restarting", restarts=3),
        a_child("kafka"),
        a_child("worker-0"),
    )
    found = report(a_run(*children), from_log(FRESH_MS + 1_000), {"kafka": "doesn't answer"}, {}, NOW_MS)
    assert not found.healthy
    assert {one.name: (one.health, one.why) for one in found.processes} == {
        "gone": ("down", "not running (ready)"),
        "another": ("down", "not running (ready)"),
        "slow": ("starting", "restarting"),
        "kafka": ("unwell", "doesn't answer"),
        "worker-0": ("unwell", "no signal for 6 s"),
    }
    shown = status_text.as_text(found)
    assert shown.startswith("NOT healthy")
    routing = " ".join(shown.split("routing", 1)[1].split())
    assert routing.startswith("demand refused regret swing simulated 3.0/s 1.2/s 12 ms - the GPU engines serve")
    assert "no signal for 6 s" in shown


def test_a_worker_that_is_heard_no_more_stays_unwell() -> None:
    starting = a_child("worker-2", state="starting")
    run = a_run(a_child("worker-0"), a_child("worker-1"), starting, a_child("kafka"))
    found = report(run, from_log(), {"kafka": ""}, {}, NOW_MS)  # only engine-0 is in any signal that was read
    assert not found.healthy
    assert {one.name: (one.health, one.why) for one in found.processes} == {
        "worker-0": ("ok", ""),
        "worker-1": ("unwell", "no signal for more than 10 s"),
        "worker-2": ("starting", "starting"),
        "kafka": ("ok", ""),
    }
    away = report(run, None, {"kafka": "doesn't answer"}, {}, NOW_MS)
    assert [one.health for one in away.processes] == ["ok", "ok", "starting", "unwell"]


def test_without_kafka_the_rest_is_still_shown() -> None:
    found = report(a_run(a_child("kafka")), None, {"kafka": "doesn't answer"}, {}, NOW_MS)
    assert found.ledger_lag is None
    shown = status_text.as_text(found)
    assert "no engine has signalled" in shown
    assert "ledger  unknown" in shown


def test_fleets_of_the_catalogue() -> None:
    assert fleets({"simulated": simulated().catalogue(NOW_MS)}) == (FLEET,)


def test_directories_that_vanish_under_the_walk_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = StateDir(tmp_path)
    for name in ("tmp_insert_1", "kept"):
        (state.clickhouse / "store" / name).mkdir(parents=True)
        (state.clickhouse / "store" / name / "data.bin").write_bytes(b"x" * 10_000)
    scan: Callable[..., Any] = os.scandir

    def merged_away(path: Any = ".") -> Any:
        if str(path).endswith("tmp_insert_1"):
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", merged_away)
    found = storage(state)
    assert not (state.clickhouse / "store" / "tmp_insert_1").exists()
    assert found["clickhouse"] == (state.clickhouse / "store" / "kept" / "data.bin").stat().st_blocks * 512
    assert found["kafka"] == 0


def test_sizes_and_durations_read_well() -> None:
    assert [status_text.size(n) for n in (0, 9_999, 10_000, 12_345_678, 9 * 10**15)] == [
        "0 B",
        "9999 B",
        "10 kB",
        "12 MB",
        "9000 TB",
    ]
    assert [status_text.duration(s) for s in (None, 0.4, 99, 100, 5_999, 7_260)] == [
        "-",
        "0 s",
        "99 s",
        "1 min",
        "99 min",
        "2 h 1 min",
    ]


def test_numbers_stand_to_the_right() -> None:
    assert table(("name", "n"), [("a", 5), ("bb", 123), ("c", None)]) == "name    n\na       5\nbb    123\nc       -"
