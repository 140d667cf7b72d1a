"""Keeps processes alive: starts them, starts them again when they die, stops them in order, and never outlives them.

A child gets SIGKILL from the kernel when the supervisor dies, and runs in a process group of its own: Ctrl-C reaches
the supervisor alone, and whatever a dead child leaves behind in its group is killed before it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from millstream.errors import StartFailed
from millstream.runfile import ChildRun, ChildState, created_s
from millstream.state import last_lines, rotate

Probe = Callable[[int], Awaitable[bool]]
"""Whether the process that was started at this time (ms since 1970) serves; asked again and again until it does"""

TRIES = 3
"""a child that has died this often without ever being ready can't be started"""
STEADY_S = 10.0
"""a life this long forgets the deaths before it"""
PROBE_EVERY_S = 0.1
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 0.5, 10.0
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process as it is to be run."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """the whole environment"""
    ready_within_s: float
    stop_within_s: float
    """after SIGTERM; then SIGKILL"""
    port: int | None = None
    """where it answers its probe: ready only when it is the process, or one below it, that listens there"""


def backoff_s(deaths: int) -> float:
    """How long to wait after that many deaths in a row: not at all after the first, then 0.5 s, 1 s, … 10 s."""
    return 0.0 if deaths < 2 else min(_BACKOFF_FIRST_S * 2.0 ** (deaths - 2), _BACKOFF_MOST_S)


class Watch:
    """One child and its lives."""

    def __init__(self, child: Child, log: Path, probe: Probe, changed: Callable[[], None]) -> None:
        self.child = child
        self.log = log
        self.state: ChildState = "waiting"
        self.restarts = 0
        self._probe = probe
        self._changed = changed
        self._process: Process | None = None
        self._created_s: float | None = None
        self._started_ms: int | None = None
        self._was_ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin its first life."""
        rotate(self.log)
        self._task = asyncio.create_task(self._live_on(), name=f"watch {self.child.name}")

    async def ready(self) -> None:
        """Wait until it has been ready for the first time. StartFailed, with the end of its log, if it can't be."""
        if self._task is None:
            raise ValueError(f"{self.child.name} hasn't been started")
        was_ready = asyncio.create_task(self._was_ready.wait())
        try:
            async with asyncio.timeout(self.child.ready_within_s):
                await asyncio.wait({was_ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise self._failed(f"isn't ready after {self.child.ready_within_s:.0f} s") from None
        finally:
            was_ready.cancel()
        if self._task.done():
            await self._task

    async def stop(self, hurry: asyncio.Event) -> None:
        """End it: SIGTERM, and SIGKILL when `hurry` is set or it takes too long."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, StartFailed):
                await self._task
        process = self._process
        if process is not None and process.returncode is None:
            self._enter("stopping")
            await self._terminate(process, hurry)
            kill_group(process.pid)
        self._enter("stopped")

    def described(self) -> ChildRun:
        """What run.json says of it."""
        process = self._process
        lives = process is not None and process.returncode is None
        return ChildRun(
            name=self.child.name,
            state=self.state,
            log=str(self.log),
            pid=process.pid if process is not None and lives else None,
            created_s=self._created_s if lives else None,
            started_ms=self._started_ms,
            restarts=self.restarts,
        )

    async def _live_on(self) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            ending = await self._live()
            steady = self.state == "ready" and time.monotonic() - began > STEADY_S
            deaths = 1 if steady else deaths + 1
            if not self._was_ready.is_set() and deaths >= TRIES:
                raise self._failed(f"ends at once, {ending}, tried {deaths} times")
            self._enter("restarting")
            _log.warning("%s is gone (%s); starting it again", self.child.name, ending)
            await asyncio.sleep(backoff_s(deaths))
            self.restarts += 1

    async def _live(self) -> str:
        """One life; how it ended."""
        self._started_ms = time.time_ns() // 1_000_000
        try:
            process = await self._spawn()
        except OSError as exc:
            return f"can't be started: {exc}"
        self._enter("starting")
        probing = asyncio.create_task(self._until_ready(process, self._started_ms), name=f"probe {self.child.name}")
        try:
            return _ending(await process.wait())
        finally:
            probing.cancel()
            await asyncio.wait({probing})
            if process.returncode is not None:
                kill_group(process.pid)

    async def _spawn(self) -> Process:
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.child.argv,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.child.env),
                process_group=0,
                preexec_fn=_dies_with(os.getpid()),
            )
        self._process = process
        self._created_s = created_s(process.pid)
        return process

    async def _until_ready(self, process: Process, since_ms: int) -> None:
        while True:
            if await self._probe(since_ms) and self._answers_itself(process):
                break
            await asyncio.sleep(PROBE_EVERY_S)
        self._enter("ready")
        self._was_ready.set()

    def _answers_itself(self, process: Process) -> bool:
        """Whether it can have been this process that answered the probe, not a stranger on its port."""
        port = self.child.port
        return process.returncode is None and (port is None or listens(process.pid, port))

    async def _terminate(self, process: Process, hurry: asyncio.Event) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        gone, hurried = asyncio.create_task(process.wait()), asyncio.create_task(hurry.wait())
        await asyncio.wait({gone, hurried}, timeout=self.child.stop_within_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not gone.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await gone

    def _enter(self, state: ChildState) -> None:
        self.state = state
        self._changed()

    def _failed(self, what: str) -> StartFailed:
        lines = "".join(f"\n  {line}" for line in last_lines(self.log)) or " (nothing)"
        return StartFailed(f"{self.child.name} {what}; the end of its log {self.log}:{lines}")


class Supervisor:
    """All children of a stack."""

    def __init__(self, log_of: Callable[[str], Path], changed: Callable[[], None]) -> None:
        self._log_of = log_of
        self._changed = changed
        self._watches: dict[str, Watch] = {}

    def start(self, child: Child, probe: Probe) -> Watch:
        """Run a child from now on."""
        watch = Watch(child, self._log_of(child.name), probe, self._changed)
        self._watches[child.name] = watch
        watch.start()
        return watch

    async def stop(self, order: tuple[frozenset[str], ...], hurry: asyncio.Event) -> None:
        """Stop everything, one set of names after the other; whatever no set names comes last."""
        named = frozenset[str]().union(*order)
        for names in (*order, frozenset(self._watches) - named):
            await asyncio.gather(*(self._watches[name].stop(hurry) for name in names if name in self._watches))

    def described(self) -> tuple[ChildRun, ...]:
        return tuple(watch.described() for watch in self._watches.values())


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def listens(pid: int, port: int) -> bool:
    """Whether a process, or one below it, listens on a TCP port."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return any(_has_listener(one, port) for one in (process, *process.children(recursive=True)))
    return False


def _has_listener(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        return any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in process.net_connections("tcp")
        )
    return False


def kill_group(group: int) -> None:
    """Kill whatever is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _dies_with(parent: int) -> Callable[[], None] | None:
    """What a child does before exec, so that the kernel kills it when `parent` dies. Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    return ask_kernel
