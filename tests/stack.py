"""A whole stack for tests: real processes, real Kafka, real ClickHouse, on free ports and a state directory of its own.

with running_stack("simulated", tmp_path) as stack:
    httpx.post(stack.base_url + "/chat/completions", headers=stack.headers, json=…)
    stack.kill("worker-0")
    stack.wait_ready()
    assert stack.verify().returncode == 0
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from millstream import runfile
from millstream.runfile import ChildRun, Run
from millstream.stack import EngineKind
from millstream.state import StateDir
from wire.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
UP_WITHIN_S = 300.0
READY_WITHIN_S = 120.0


@dataclass(frozen=True)
class Handle:
    """A running stack."""

    state: StateDir
    environ: Mapping[str, str]

    @property
    def run(self) -> Run:
        """run.json as it is now."""
        return runfile.running(self.state.path)

    @property
    def base_url(self) -> str:
        """http://127.0.0.1:PORT/v1"""
        return self.run.base_url

    @property
    def root_url(self) -> str:
        """http://127.0.0.1:PORT"""
        return self.base_url.removesuffix("/v1")

    @property
    def key(self) -> str:
        return self.state.key_file.read_text().strip()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def model(self) -> str:
        return self.run.model

    @property
    def settings(self) -> Settings:
        """To reach the stack's Kafka and ClickHouse directly."""
        return self.run.settings()

    def child(self, name: str) -> ChildRun:
        """kafka, clickhouse, ingress, worker-0 …, control or ledger."""
        return next(child for child in self.run.children if child.name == name)

    def pid(self, name: str) -> int:
        """The process's id; waits while it is being started again."""
        return wait_for(lambda: self.child(name).pid, f"{name} runs")

    def pids(self) -> dict[str, int]:
        """Of all processes that run, by name."""
        return {child.name: child.pid for child in self.run.children if child.pid is not None}

    def engine_pids(self, worker: str = "worker-0") -> list[int]:
        """The engine processes below a worker."""
        return [child.pid for child in psutil.Process(self.pid(worker)).children(recursive=True)]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a process; the id it had."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = READY_WITHIN_S) -> int:
        """Wait until another process than `old_pid` has the name and is ready; its id."""

        def again() -> int | None:
            child = self.child(name)
            return child.pid if child.state == "ready" and child.pid != old_pid else None

        return wait_for(again, f"{name} is back", timeout_s)

    def wait_ready(self, timeout_s: float = READY_WITHIN_S) -> None:
        """Wait until every process is ready and `millstream status` calls the stack healthy."""
        wait_for(lambda: all(child.state == "ready" for child in self.run.children), "all are ready", timeout_s)
        wait_for(lambda: self.command("status").returncode == 0, "the stack is healthy", timeout_s)

    def command(self, *argv: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `millstream …` on this stack."""
        return millstream(*argv, state=self.state.path, environ=self.environ, timeout_s=timeout_s)

    def verify(self) -> subprocess.CompletedProcess[str]:
        """`millstream verify`: exit code 0 when journals and ledger agree."""
        return self.command("verify")

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Rows of the ledger's database."""
        done = self.command("sql", query, "--format", "JSONEachRow")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def log(self, name: str) -> str:
        """A process's log so far."""
        return self.state.log(name).read_text(errors="replace")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = READY_WITHIN_S) -> Any:
    """What `condition` returns as soon as that is true."""
    give_up = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up, f"not so within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)
    return found


def millstream(
    *argv: str, state: Path | None = None, environ: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, in a process of its own."""
    env = {**os.environ, **(environ or {})}
    if state is not None:
        env["MILLSTREAM_STATE_DIR"] = str(state)
    return subprocess.run(
        [sys.executable, "-m", "millstream", *argv],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def running_stack(
    engine: EngineKind, directory: Path, *options: str, environ: Mapping[str, str] | None = None
) -> Iterator[Handle]:
    """`millstream up --detach` on free ports; stopped at the end. Started again on the same directory it goes on.

    `options`: more options of `up`. `environ`: settings, such as {"MILLSTREAM_SIMULATED_TBT_MS": "20"}.
    """
    state = StateDir(directory.absolute() / "state")
    ports = ("--port", "0", "--kafka-port", "0", "--clickhouse-port", "0")
    up = millstream(
        *("up", "--detach", "--engine", engine, *ports, *options),
        state=state.path,
        environ=environ,
        timeout_s=UP_WITHIN_S,
    )
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        yield Handle(state, dict(environ or {}))
    finally:
        down = millstream("down", state=state.path, timeout_s=180.0)
        assert down.returncode in (0, 6), down.stdout + down.stderr
