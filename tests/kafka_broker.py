"""A real broker for tests: one process, that can be killed and started again on the same data."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millstream.kafka.broker import BrokerConfig, command, format_storage, jars, ready
from millstream.paths import cache_dir
from millstream.ports import free_port
from wire.settings import Cluster


class RunningBroker:
    """One broker and its process."""

    def __init__(self, directory: Path) -> None:
        self._jars = jars(cache_dir(), print)
        self._config = BrokerConfig(data_dir=directory / "data", port=free_port(), controller_port=free_port())
        self._log = directory / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None
        format_storage(self._jars, self._config)

    @property
    def cluster(self) -> Cluster:
        return Cluster(bootstrap=self._config.bootstrap, replication=1)

    def launch(self) -> None:
        """Start the process, without waiting for it to serve."""
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command(self._jars, self._config), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    async def serving(self, within_s: float = 60.0) -> None:
        """Wait until it serves."""
        until = time.monotonic() + within_s
        while not await ready(self._config.bootstrap):
            gone = self._process is None or self._process.poll() is not None
            if gone or time.monotonic() > until:
                raise RuntimeError(f"the broker doesn't start; its log ends:\n{self._log.read_text()[-2000:]}")
            await asyncio.sleep(0.1)

    def start(self) -> None:
        """Start it and wait until it serves."""
        self.launch()
        # in a thread: a fixture that runs inside an event loop may be what needs it
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: asyncio.run(self.serving())).result()

    def signal(self, number: int) -> None:
        """SIGKILL also waits for the end."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def stop(self) -> None:
        """End it for good; its data is not needed any more."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
