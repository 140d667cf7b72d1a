"""The engine process as the I/O process sees it: commands out, events in.

Nothing restarts by itself: after Died the worker first journals the Crash, then calls `restart` and adds what is
unfinished again. What is said to a dead engine is lost, which is right: it will all be said again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from workers.engine.errors import EngineGone
from workers.engine.link import (
    Add,
    Applied,
    Command,
    Config,
    Drop,
    Forget,
    Frames,
    Ready,
    Report,
    Running,
    Stepped,
    Stop,
    Taking,
    frame,
)
from workers.engine.protocol import Key, Sequence

_READ_BYTES = 1 << 20
_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}
"""torch's threads spin a millisecond while they wait for one another: on cores that other processes use too that made
a step up to ten times as long; not spinning at all costs twice the time on free cores"""
_LAST_LINES = 10
_LINE_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The engine process has ended; every Stepped it sent has been given before this."""

    status: int
    """exit status; −n: killed by signal n"""
    last_words: str
    """the last lines it logged"""
    suspects: tuple[Key, ...] = ()
    """the requests it ran or was taking on; some may have ended since"""


@dataclass(slots=True)
class _Suspects:
    """Whom an engine had when it was heard last."""

    running: tuple[Key, ...] = ()
    taking: tuple[Key, ...] = ()

    def hear(self, report: Report) -> None:
        match report:
            case Running(keys=keys):
                self.running, self.taking = keys, ()
            case Taking(key=key):
                self.taking = (key,)
            case Stepped():
                self.taking = ()


Event = Ready | Stepped | Died


class EngineHost:
    """Owns one engine process at a time."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs, if one does."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process. Ready comes when the engine is loaded; Died if it couldn't be."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "workers.engine", str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**_ENVIRONMENT, **os.environ},
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._watch = asyncio.create_task(self._follow(self._process, reader, self._writer), name="engine")
        self._say(self._config)

    async def restart(self) -> None:
        """Start again after Died; whatever still runs is killed first."""
        await self._end(grace_s=0)
        await self.start()

    async def ready(self) -> Ready:
        """Wait for the first event of a start. EngineGone if the engine ended instead of getting ready."""
        event = await self._events.get()
        if isinstance(event, Ready):
            return event
        words = event.last_words if isinstance(event, Died) else "it spoke out of turn"
        raise EngineGone(f"the engine ended before it was ready: {words}")

    async def events(self) -> AsyncIterator[Event]:
        """What happens, in order, for as long as the host is used; goes on over a restart."""
        while True:
            yield await self._events.get()

    def add(self, sequence: Sequence) -> None:
        """`Engine.add`. Lost if the engine is dead."""
        self._say(Add(sequence=sequence))

    def cancel(self, key: Key) -> None:
        """`Engine.cancel`. Tokens of steps already on their way may still come."""
        self._say(Forget(key=key))

    def drop(self, shard: int, epoch: int) -> None:
        """Forget every sequence of an epoch."""
        self._say(Drop(shard=shard, epoch=epoch))

    def applied(self, step: int) -> None:
        """Everything up to this step is in the journal. The engine never runs more than 64 steps ahead of that."""
        self._say(Applied(step=step))

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the process: after its current step, or by force when that takes longer than `grace_s`."""
        self._say(Stop())
        await self._end(grace_s)

    def _say(self, command: Command) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(command))

    async def _end(self, grace_s: float) -> None:
        process, watch = self._process, self._watch
        if process is None or watch is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(watch), grace_s)
        if process.returncode is None:
            process.kill()
        await watch
        self._process = self._writer = self._watch = None

    async def _follow(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on what the process says until it ends, then tell how."""
        words: deque[str] = deque(maxlen=_LAST_LINES)
        suspects = _Suspects()
        try:
            await asyncio.gather(self._listen(reader, suspects), _relay(process, words))
            status = await process.wait()
        finally:
            writer.close()
        named = (*suspects.running, *suspects.taking)
        self._events.put_nowait(Died(status=status, last_words="\n".join(words), suspects=named))

    async def _listen(self, reader: asyncio.StreamReader, suspects: _Suspects) -> None:
        frames = Frames()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                frames.feed(data)
                for report in frames.reports():
                    suspects.hear(report)
                    if isinstance(report, Ready | Stepped):
                        self._events.put_nowait(report)


async def _relay(process: asyncio.subprocess.Process, words: deque[str]) -> None:
    """Copy the engine's log to ours, and keep its end."""
    assert process.stderr is not None
    while line := await _line(process.stderr):
        sys.stderr.buffer.write(line)
        sys.stderr.flush()
        words.append(line.decode("utf-8", "replace").rstrip()[:_LINE_BYTES])


async def _line(stderr: asyncio.StreamReader) -> bytes:
    try:
        return await stderr.readuntil(b"\n")
    except asyncio.IncompleteReadError as exc:
        return exc.partial
    except asyncio.LimitOverrunError as exc:
        return await stderr.readexactly(exc.consumed)
