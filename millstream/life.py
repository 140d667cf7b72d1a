"""One life of a stack: brought up in the right order, kept up, taken down. Nothing outlives a start that failed.

What can run side by side does: Kafka's start, ClickHouse's, and the model's conversion.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from millstream import install, probes, runfile, welcome
from millstream.errors import StartFailed, StateBroken
from millstream.kafka import broker
from millstream.observe import Seen
from millstream.paths import cache_dir
from millstream.runfile import Run, StackState
from millstream.stack import Stack
from millstream.state import StateDir
from millstream.supervise import Child, Probe, Supervisor
from millstream.wish import Say
from wire.bus import Record
from wire.clock import SystemClock
from wire.follow import Tail
from wire.kafka import KafkaBus
from wire.messages import Signal, Snapshot
from wire.topics import SIGNALS, WEIGHTS

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 2.0


class Life:
    """A stack that runs until SIGINT, SIGTERM or SIGHUP, or its state directory is gone; a second signal hurries."""

    def __init__(self, stack: Stack, state: StateDir, say: Say, announce: Callable[[Run], None]) -> None:
        self._stack = stack
        self._state = state
        self._say = say
        self._announce = announce
        self._bus = KafkaBus(stack.settings().cluster, SystemClock())
        self._seen = Seen()
        self._tails = (
            Tail[Signal](self._bus, SIGNALS, Signal, self._heard, dead=_not_mine),
            Tail[Snapshot](self._bus, WEIGHTS, Snapshot, self._heard, dead=_not_mine),
        )
        self._supervisor = Supervisor(state.log, self._write)
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._run = welcome.first_run(stack, os.getpid())

    async def run(self) -> None:
        """Start everything, say so, wait for the signal, stop everything. StartFailed, or what else went wrong."""
        self._listen()
        self._write()
        starting = asyncio.create_task(self._start(), name="start")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        homeless = asyncio.create_task(self._until_homeless(), name="state directory")
        try:
            await asyncio.wait({starting, stopping, homeless}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                raise StartFailed("stopped before it was ready, as a signal asked")
            if starting.done():
                await starting
                self._enter("ready")
                self._announce(self._run)
                await asyncio.wait({stopping, homeless}, return_when=asyncio.FIRST_COMPLETED)
            if homeless.done():
                await homeless
        finally:
            await self._end(starting, stopping, homeless)

    async def _until_homeless(self) -> None:
        """StateBroken once the state directory is gone, or another has its name: what runs could keep nothing."""
        home = self._state.path.stat()
        while self._state.is_at(home):  # noqa: ASYNC110 - a directory tells nobody
            await asyncio.sleep(_LOOK_EVERY_S)
        self._hurry.set()
        raise StateBroken(f"{self._state.path} was deleted or moved while the stack ran, so it was stopped")

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._asked_to_stop)

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _end(self, *tasks: asyncio.Task[object]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._enter("stopping")
        self._say("stopping; once more hurries")
        await asyncio.gather(*(tail.stop() for tail in self._tails))
        await self._supervisor.stop(self._stack.stop_order(), self._hurry)
        _end_descendants()
        self._state.run_file.unlink(missing_ok=True)
        self._say("stopped")

    async def _start(self) -> None:
        """Start everything. The first thing that fails fails the start."""
        async with _FirstFailure() as group:
            log = group.create_task(self._log())
            model = group.create_task(self._model())
            store = group.create_task(self._store())
            self._start_after(group, self._stack.ingress(), probes.ingress(self._run), log)
            # It speaks only of models that a worker has spoken of, and no worker starts before its model is there.
            self._start_after(group, self._stack.control(), probes.control(self._seen, self._run.model), log, model)
            self._start_after(group, self._stack.ledger(), probes.ledger(self._run), log, store)
            # A worker waits for its log by itself; the topics must exist, though.
            filled = install.is_filled(self._stack, self._state)
            group.create_task(self._work(model if filled else log, model))
        await probes.first_route(self._run)

    def _start_after(self, group: asyncio.TaskGroup, child: Child, probe: Probe, *first: asyncio.Task[object]) -> None:
        async def start() -> None:
            for task in first:
                await task
            await self._ready(child, probe)

        group.create_task(start(), name=child.name)

    async def _log(self) -> None:
        """Kafka, with everything in it that the processes expect to find."""
        config = broker.BrokerConfig(
            data_dir=self._state.kafka / "data",
            port=self._stack.kafka_port,
            controller_port=self._stack.controller_port,
        )
        try:
            argv = await asyncio.to_thread(_broker_argv, config, self._say)
        except broker.KafkaSetupError as exc:
            raise StartFailed(str(exc)) from exc
        await self._ready(self._stack.kafka(argv), probes.kafka(config.bootstrap))
        await install.insist(lambda: install.fill_log(self._bus, self._stack, self._state), "Kafka's topics and keys")
        await asyncio.gather(*(tail.start() for tail in self._tails))

    async def _store(self) -> None:
        """ClickHouse, with its schema."""
        await self._ready(self._stack.clickhouse(), probes.clickhouse(self._run))
        await install.insist(lambda: install.apply_schema(self._stack.settings()), "ClickHouse's tables")

    async def _model(self) -> Path | None:
        """The converted model's directory; None where the engine needs none."""
        served = self._stack.served
        if served.engine_kind == "simulated" or served.directory is not None:
            return served.directory
        from millstream.model import prepare

        return await asyncio.to_thread(prepare, cache_dir(), self._say)

    async def _work(self, first: asyncio.Task[object], model: asyncio.Task[Path | None]) -> None:
        await first
        stack = replace(self._stack, served=replace(self._stack.served, directory=await model))
        async with asyncio.TaskGroup() as group:
            for index in range(stack.workers):
                probe = probes.worker(self._seen, index)
                group.create_task(self._ready(stack.worker(index), probe))

    async def _ready(self, child: Child, probe: Probe) -> None:
        began_s = time.monotonic()
        await self._supervisor.start(child, probe).ready()
        self._say(f"{child.name:<12} ready after {time.monotonic() - began_s:.1f} s")

    def _heard(self, message: Signal | Snapshot, _record: Record) -> None:
        self._seen.take(message)

    def _enter(self, state: StackState) -> None:
        ready_ms = time.time_ns() // 1_000_000 if state == "ready" else self._run.ready_ms
        self._run = msgspec.structs.replace(self._run, state=state, ready_ms=ready_ms)
        self._write()

    def _write(self) -> None:
        self._run = msgspec.structs.replace(self._run, children=self._supervisor.described())
        try:
            runfile.write(self._state, self._run)
        except OSError as exc:  # a full disk must not end the watch over what runs
            _log.warning("%s can't be written, so `millstream status` shows what was before: %s", exc.filename, exc)


class _FirstFailure(asyncio.TaskGroup):
    """A task group whose error is the first failure itself, not a group of them."""

    async def __aexit__(self, *exc: object) -> None:
        try:
            await super().__aexit__(*exc)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _end_descendants() -> None:
    """End what a start that was cut short still runs: Maven, the model's conversion. Both begin anew the next time."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _broker_argv(config: broker.BrokerConfig, say: Say) -> list[str]:
    """The broker's command line, with its jars fetched and its storage made. Blocks; KafkaSetupError."""
    jar_dir = broker.jars(cache_dir(), say)
    broker.format_storage(jar_dir, config)
    return broker.command(jar_dir, config)


async def _not_mine(_record: Record, _why: str) -> None:
    """What can't be decoded is reported by the parts that live on it."""
