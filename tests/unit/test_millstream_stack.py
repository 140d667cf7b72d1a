"""What the stack consists of."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planned import a_stack

from millstream import stack
from millstream.install import is_filled
from millstream.stack import Stack
from millstream.state import open_state
from wire.errors import SettingsError
from wire.fleet import Fleet
from wire.settings import Settings


def two_workers(environ: dict[str, str] | None = None) -> Stack:
    return a_stack(served=stack.smollm2(), workers=2, threads=3, environ=environ or {})


def test_every_process_gets_settings_that_it_can_read() -> None:
    whole = two_workers()
    for child in (whole.ingress(), whole.worker(0), whole.worker(1), whole.control(), whole.ledger()):
        settings = Settings.from_env(child.env)
        assert settings.cluster.bootstrap == "127.0.0.1:9092"
        assert settings.cluster.replication == 1
        assert settings.clickhouse.port == 8123
        assert child.argv[:2] == (sys.executable, "-m")


def test_a_worker_runs_an_engine_of_the_catalogue_s_fleet() -> None:
    whole = replace(two_workers(), served=replace(stack.smollm2(), directory=Path("/model")))
    settings = Settings.from_env(whole.worker(1).env)
    model = whole.served.catalogue(now_ms=5)
    (version,) = model.versions
    fleet = Fleet(settings.region, settings.pool, model.slug, settings.model_version, settings.numerics)
    assert fleet == whole.served.fleet
    assert (settings.model, settings.model_version, settings.numerics) == (
        model.name,
        version.version,
        version.numerics,
    )
    assert settings.region in version.regions
    assert settings.pool in version.pools
    assert (settings.engine, settings.engine_kind, settings.engine_threads) == ("engine-1", "torch", 3)
    assert settings.model_dir == Path("/model")


def test_the_numerics_class_is_the_fastest_that_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    assert stack.smollm2(bare).numerics == "exact"
    monkeypatch.setattr(stack, "possible", lambda environ: True)
    assert stack.smollm2(bare).numerics == "latency"
    assert stack.smollm2({**bare, "MILLSTREAM_NUMERICS": "bf16"}).numerics == "bf16"


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_numerics_class_is_one_that_costs_little() -> None:
    from millstream.model import prepare
    from millstream.paths import cache_dir
    from workers.engine.quality import default_of

    assert default_of(prepare(cache_dir(), print)) == "latency"


def test_the_ledger_s_group_is_the_one_whose_backlog_status_shows() -> None:
    from aggregator.ledger import GROUP
    from millstream.status import LEDGER_GROUP

    assert LEDGER_GROUP == GROUP


def test_the_topics_are_those_of_the_model_s_fleet() -> None:
    names = {topic.name: topic.partitions for topic in two_workers().topics()}
    fleet = two_workers().served.fleet.name
    assert names[f"requests.{fleet}"] == names[f"journal.{fleet}"] == stack.SHARDS
    assert names["replies.local"] == stack.SLOTS
    assert "credentials" in names


def test_the_user_s_settings_reach_the_processes_but_not_those_the_stack_decides() -> None:
    whole = two_workers(
        {"MILLSTREAM_ENGINE_SLOTS": "7", "MILLSTREAM_PORT": "1", "MILLSTREAM_ENGINE": "mine", "HOME": "/h"}
    )
    worker = whole.worker(0)
    settings = Settings.from_env(worker.env)
    assert settings.engine_slots == 7
    assert settings.port == 8080
    assert settings.engine == "engine-0"
    assert worker.env["HOME"] == "/h"


def test_only_the_ingress_gets_the_secret() -> None:
    whole = two_workers()
    assert Settings.from_env(whole.ingress().env).key_secret == "ab" * 32
    for child in (whole.worker(0), whole.control(), whole.ledger(), whole.clickhouse(), whole.kafka(["java"])):
        assert "ab" * 32 not in child.env.values()


def test_a_wrong_setting_of_the_user_is_found_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="MILLSTREAM_ENGINE_SLOTS is 'x'"):
        two_workers({"MILLSTREAM_ENGINE_SLOTS": "x"}).settings()


def test_stopping_begins_at_the_front_and_ends_with_the_log() -> None:
    whole = two_workers()
    order = [sorted(names) for names in whole.stop_order()]
    assert order == [["ingress"], ["worker-0", "worker-1"], ["control", "ledger"], ["clickhouse"], ["kafka"]]


def test_a_worker_may_drain_before_it_is_killed() -> None:
    worker = two_workers({"MILLSTREAM_DRAIN_TIMEOUT_MS": "90000"}).worker(0)
    assert worker.stop_within_s > 90


def test_a_log_made_for_another_model_is_made_ready_again(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    whole = two_workers()
    assert not is_filled(whole, state)
    state.installed_file.write_text("something else")
    assert not is_filled(whole, state)
