"""What the one-machine stack consists of: which processes, with which settings. Pure; `millstream.up` runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from millstream.runfile import HOST
from millstream.state import StateDir
from millstream.supervise import Child
from wire.fleet import Fleet, slug_of
from wire.messages import Model, ModelVersion, Pool
from wire.settings import PREFIX, ClickHouse, Cluster, Settings
from wire.topics import Topic, all_topics
from workers.engine.native.build import possible
from workers.engine.numerics import EXACT, LATENCY

EngineKind = Literal["torch", "simulated"]
REGION = "local"
POOL: Pool = "cpu"
VERSION = "1"
SHARDS = 4
"""of the model's fleet, and so the most workers that can serve it"""
SLOTS = 8
"""reply slots of the region"""

KAFKA, CLICKHOUSE, INGRESS, CONTROL, LEDGER = "kafka", "clickhouse", "ingress", "control", "ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model that a stack serves, and what runs it."""

    name: str
    numerics: str
    engine_kind: EngineKind
    owned_by: str
    context_tokens: int
    directory: Path | None = None
    """the converted model; the simulated engine needs none"""

    @property
    def fleet(self) -> Fleet:
        return Fleet(REGION, POOL, slug_of(self.name), VERSION, self.numerics)

    def catalogue(self, now_ms: int) -> Model:
        """The model's catalogue record."""
        version = ModelVersion(
            version=VERSION, numerics=self.numerics, pools=(POOL,), regions=(REGION,), share=1.0, shards=SHARDS
        )
        return Model(
            name=self.name,
            slug=slug_of(self.name),
            owned_by=self.owned_by,
            created_ms=now_ms,
            context_tokens=self.context_tokens,
            versions=(version,),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One installation on one machine."""

    state_dir: Path
    port: int
    kafka_port: int
    clickhouse_port: int
    controller_port: int
    """Kafka's, for itself only"""
    ledger_port: int
    """of the ledger's metrics: whoever asks there learns whether it lives"""
    key_secret: str
    served: Served
    workers: int
    threads: int
    """of each worker's engine"""
    environ: Mapping[str, str]
    """of the command; MILLSTREAM_ settings in it reach the processes, but for those the stack decides"""

    def topics(self) -> tuple[Topic, ...]:
        """Every topic the installation needs."""
        return all_topics([(self.served.fleet, SHARDS)], [(REGION, SLOTS)])

    def settings(self) -> Settings:
        """The settings all processes share. SettingsError when one that the user gave is wrong."""
        return Settings.from_env(self._env({}))

    def kafka(self, argv: list[str]) -> Child:
        """The broker; `argv` is millstream.kafka's command line."""
        return Child(
            name=KAFKA,
            argv=tuple(argv),
            env=dict(self.environ),
            ready_within_s=90.0,
            stop_within_s=15.0,
            port=self.kafka_port,
        )

    def clickhouse(self) -> Child:
        data = str(StateDir(self.state_dir).clickhouse)
        argv = ("millstream.clickhouse", "--data", data, "--port", str(self.clickhouse_port))
        return self._python(CLICKHOUSE, *argv, port=self.clickhouse_port, within_s=60.0, stop_s=10.0)

    def ingress(self) -> Child:
        mine = {"SLOT": "0", "KEY_SECRET": self.key_secret}
        return self._python(INGRESS, "ingress", mine=mine, port=self.port, within_s=60.0, stop_s=15.0)

    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"worker-{index}" for index in range(self.workers))

    def worker(self, index: int) -> Child:
        """The worker of engine `engine-<index>`."""
        drain_s = self.settings().drain_timeout_ms / 1000
        mine = {
            "ENGINE": engine_of(index),
            "ENGINE_KIND": self.served.engine_kind,
            "ENGINE_THREADS": str(self.threads),
            "ENGINE_DEVICE": "cpu",
            "POOL": POOL,
            "MODEL": self.served.name,
            "MODEL_VERSION": VERSION,
            "MODEL_DIR": str(self.served.directory or ""),
            "NUMERICS": self.served.numerics,
            "CONTEXT_TOKENS": str(self.served.context_tokens),
        }
        return self._python(self.worker_names()[index], "workers", mine=mine, within_s=300.0, stop_s=drain_s + 10.0)

    def control(self) -> Child:
        return self._python(CONTROL, "aggregator", CONTROL, within_s=120.0, stop_s=10.0)

    def ledger(self) -> Child:
        mine = {"METRICS_PORT": str(self.ledger_port)}
        return self._python(LEDGER, "aggregator", LEDGER, mine=mine, port=self.ledger_port, within_s=60.0, stop_s=10.0)

    def stop_order(self) -> tuple[frozenset[str], ...]:
        """Nothing new comes in, what runs is drained, its usage is read, then the stores go."""
        return (
            frozenset({INGRESS}),
            frozenset(self.worker_names()),
            frozenset({CONTROL, LEDGER}),
            frozenset({CLICKHOUSE}),
            frozenset({KAFKA}),
        )

    def _python(
        self,
        name: str,
        *module: str,
        mine: Mapping[str, str] | None = None,
        port: int | None = None,
        within_s: float,
        stop_s: float,
    ) -> Child:
        argv = (sys.executable, "-m", *module)
        return Child(
            name=name, argv=argv, env=self._env(mine or {}), ready_within_s=within_s, stop_within_s=stop_s, port=port
        )

    def _env(self, mine: Mapping[str, str]) -> dict[str, str]:
        cluster = Cluster(bootstrap=f"{HOST}:{self.kafka_port}", replication=1)
        clickhouse = ClickHouse(host=HOST, port=self.clickhouse_port)
        decided = {
            "REGION": REGION,
            "REGIONS": _json({REGION: cluster}),
            "STATE_DIR": str(self.state_dir),
            "CLICKHOUSE": _json(clickhouse),
            "PORT": str(self.port),
            "SLOTS": str(SLOTS),
            "METRICS_PORT": "0",
            **mine,
        }
        return {**self.environ, "PYTHONUNBUFFERED": "1", **{PREFIX + name: text for name, text in decided.items()}}


def engine_of(index: int) -> str:
    """The engine's name of a worker: also its static member id, so it stays the same over restarts."""
    return f"engine-{index}"


def simulated() -> Served:
    """The model that only a latency model answers for: for tests and measurements."""
    return Served(name="simulated", numerics="sim", engine_kind="simulated", owned_by="millstream", context_tokens=2048)


def smollm2(environ: Mapping[str, str] = os.environ) -> Served:
    """The real model, converted by `millstream.model`; in the class MILLSTREAM_NUMERICS names, or the fastest here."""
    return Served(
        name="SmolLM2-135M-Instruct",
        numerics=environ.get(PREFIX + "NUMERICS") or (LATENCY.name if possible(environ) else EXACT),
        engine_kind="torch",
        owned_by="HuggingFaceTB",
        context_tokens=2048,
    )


def served_of(kind: EngineKind) -> Served:
    """What a stack with this kind of engine serves."""
    return simulated() if kind == "simulated" else smollm2()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
