"""A real chDB behind ClickHouse's HTTP interface for tests: one process, that can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from millstream.ports import free_port
from wire.settings import ClickHouse

ROOT = Path(__file__).resolve().parents[1]


class RunningClickHouse:
    """One process over one data directory."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "clickhouse"
        self.port = free_port()
        self._log = directory / "clickhouse.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def settings(self, database: str) -> ClickHouse:
        return ClickHouse(port=self.port, database=database)

    def start(self, within_s: float = 60.0, **environ: str) -> None:
        """Start it, with more in its environment, and wait until it answers."""
        argv = [sys.executable, "-m", "millstream.clickhouse", "--data", str(self.data), "--port", str(self.port)]
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **environ}, stdout=out, stderr=out)
        until = time.monotonic() + within_s
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"clickhouse doesn't start; its log ends:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def answers(self) -> bool:
        try:
            return httpx.get(self.url + "ping", timeout=2.0).text == "Ok.\n"
        except httpx.HTTPError:
            return False

    def ask(self, sql: str, **params: str) -> httpx.Response:
        """POST a statement as curl would."""
        return httpx.post(self.url, params=params, content=sql.encode(), timeout=60.0)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def stop(self) -> None:
        """End it for good."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
