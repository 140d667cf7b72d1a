"""A stack of a measurement's own: free ports, a state directory that is gone afterwards."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from millstream import runfile
from millstream.errors import StartFailed
from millstream.runfile import Run
from millstream.state import StateDir
from millstream.wish import Say


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A stack that runs."""

    run: Run
    state: StateDir
    key: str

    def processes(self) -> dict[str, psutil.Process]:
        """Every process by name, those below a worker too."""
        found: dict[str, psutil.Process] = {}
        for child in runfile.running(self.state.path).children:
            if child.pid is None:
                continue
            found[child.name] = psutil.Process(child.pid)
            for number, below in enumerate(found[child.name].children(recursive=True)):
                found[f"{child.name}/{number}"] = below
        return found


@asynccontextmanager
async def own_stack(settings: Mapping[str, str], say: Say) -> AsyncIterator[Own]:
    """A stack with the simulated engine. `settings`: MILLSTREAM_ variables. StartFailed with what `up` said."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as directory:
        state = StateDir.at(Path(directory) / "state")
        say("starting a stack")
        ports = ("--port", "0", "--kafka-port", "0", "--clickhouse-port", "0")
        code, text = await _millstream(state, settings, "up", "--detach", "--engine", "simulated", *ports)
        if code != 0:
            raise StartFailed(f"the stack to measure did not start:\n{text}")
        try:
            yield Own(run=runfile.running(state.path), state=state, key=state.key_file.read_text().strip())
        finally:
            say("stopping it")
            await _millstream(state, settings, "down", "--now")


async def _millstream(state: StateDir, settings: Mapping[str, str], verb: str, *argv: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millstream", verb, "--state", str(state.path), *argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **settings},
    )
    text, _ = await process.communicate()
    return process.returncode or 0, text.decode(errors="replace").strip()
