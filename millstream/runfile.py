"""run.json: what runs, as the supervisor last wrote it; how every other command finds the stack."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import psutil

from millstream.errors import NotRunning
from millstream.state import StateDir, is_running, write_private
from wire.settings import ClickHouse, Cluster, Settings

ChildState = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped"]
StackState = Literal["starting", "ready", "stopping"]
HOST = "127.0.0.1"


class ChildRun(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the stack."""

    name: str
    state: ChildState
    log: str
    pid: int | None = None
    created_s: float | None = None
    """the kernel's start time of `pid`: the same number later is another process"""
    started_ms: int | None = None
    restarts: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a stack."""

    pid: int
    """the supervisor's"""
    created_s: float
    state: StackState
    started_ms: int
    port: int
    kafka_port: int
    clickhouse_port: int
    ledger_port: int
    region: str
    model: str
    engine_kind: str
    state_dir: str
    versions: dict[str, str]
    slots: int
    ready_ms: int | None = None
    children: tuple[ChildRun, ...] = ()

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as base URL."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def clickhouse_url(self) -> str:
        return f"http://{HOST}:{self.clickhouse_port}/"

    def settings(self, key_secret: str = "") -> Settings:
        """The settings with which a command reaches the stack."""
        return Settings(
            region=self.region,
            regions={self.region: Cluster(bootstrap=f"{HOST}:{self.kafka_port}", replication=1)},
            state_dir=Path(self.state_dir),
            clickhouse=ClickHouse(host=HOST, port=self.clickhouse_port),
            port=self.port,
            slots=self.slots,
            key_secret=key_secret,
        )


def write(state: StateDir, run: Run) -> None:
    """Put down what runs now, in one step."""
    write_private(state.run_file, msgspec.json.format(msgspec.json.encode(run), indent=2).decode() + "\n")


def read(state: StateDir) -> Run | None:
    """What run.json says, whether or not it still runs; None without one, or with one that can't be read."""
    try:
        return msgspec.json.decode(state.run_file.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError):
        return None


def running(path: Path) -> Run:
    """The stack that runs on the state directory at `path`. NotRunning, and what to do, if there is none."""
    state = StateDir.at(path)
    run = read(state) if is_running(state) else None
    if run is None:
        raise NotRunning(
            f"no stack runs on {path}; start one with `millstream up`, or name its directory with --state or"
            " MILLSTREAM_STATE_DIR"
        )
    return run


def created_s(pid: int) -> float | None:
    """The kernel's start time of a process; None if there is none of this number."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def alive(pid: int | None, created: float | None) -> bool:
    """Whether this very process lives (a zombie doesn't)."""
    if pid is None:
        return False
    try:
        process = psutil.Process(pid)
        same = created is None or abs(process.create_time() - created) < 0.05
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def remnants(run: Run) -> tuple[ChildRun, ...]:
    """Children of a stack whose supervisor is gone that still live."""
    return tuple(child for child in run.children if alive(child.pid, child.created_s))
