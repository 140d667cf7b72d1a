"""The control app: the topic `signals` → routing weights on the topic `weights`, each second.

One process sees all signals. It keeps nothing and commits nothing: started anew it begins at the end of the log and
knows every engine a second later. It publishes over its own producer and not Faust's, which an outage can break.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import faust

from aggregator.app import keep_running, make_app
from aggregator.publish import Publisher
from aggregator.windows import Windows
from routing.earlier import Feedback
from routing.errors import BadSketch
from routing.plan import Network
from wire.bus import Bus, Record
from wire.clock import Clock, SystemClock
from wire.codec import decode
from wire.errors import DecodeError
from wire.follow import Dump, Follower, dead_letters
from wire.messages import Model, Signal
from wire.settings import Settings
from wire.topics import CATALOGUE, SIGNALS

log = logging.getLogger("millstream.control")

GROUP = "control"


async def run(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    """Publish weights until `stop` is set. Waits for a log that is away."""
    feedback = Feedback() if settings.routing_policy == "earlier" else None
    clock, network = SystemClock(), Network(trips_ms=settings.between_ms(), forbidden=settings.forbidden())
    windows = Windows(network, feedback, settings.shed_wait_ms)
    weights = await bus.producer(client_id="control-weights")
    dead = await bus.producer(client_id="control-dead")
    dump = dead_letters(dead, GROUP, clock)
    listener = Listener(windows, dump, clock)
    catalogue = Follower[Model](bus, CATALOGUE, Model, clock=clock, dead=dump, on_change=windows.rolled_out)
    await catalogue.start()
    ticking = asyncio.create_task(tick(settings, windows, Publisher(weights), clock), name="control tick")
    running = asyncio.create_task(keep_running(lambda: build(settings, listener.hear), stop), name="control app")
    try:
        done, _ = await asyncio.wait({ticking, running}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        ticking.cancel()
        running.cancel()
        await asyncio.gather(ticking, running, return_exceptions=True)
        await asyncio.gather(weights.stop(), dead.stop(), catalogue.stop())


def build(settings: Settings, hear: Callable[[Record], Awaitable[None]]) -> faust.App:
    """The Faust app: one agent that hands every record on."""
    app = make_app(settings, GROUP, reset="latest")

    async def signals(stream: Any) -> None:
        async for event in stream.events():
            await hear(_record(event.message))

    # without acks nothing is committed: what was missed while nobody listened is out of date anyway
    app.agent(app.topic(SIGNALS, acks=False), concurrency=1)(signals)
    return app


async def tick(settings: Settings, windows: Windows, publisher: Publisher, clock: Clock) -> None:
    """Publish a round of snapshots each interval for as long as signals come in.

    While none do, nothing is known that the last snapshots don't say; their age tells the ingresses how far to
    rely on them.
    """
    while True:
        await asyncio.sleep(settings.snapshot_interval_ms / 1000)
        now_ms = clock.now_ms()
        if windows.listens(now_ms):
            await publisher.publish(windows.snapshots(settings.regions, now_ms))


class Listener:
    """Records of `signals` into the windows; what can't be used goes to `dead`."""

    def __init__(self, windows: Windows, dead: Dump, clock: Clock) -> None:
        self._windows = windows
        self._dead = dead
        self._clock = clock

    async def hear(self, record: Record) -> None:
        """Take one record. Never raises for what it holds."""
        try:
            signal: Signal = decode(record.value, Signal)
            self._windows.hear(signal, record.offset, self._clock.now_ms())
        except (DecodeError, BadSketch) as exc:
            log.warning("the signal at offset %d can't be used: %s", record.offset, exc)
            await self._dead(record, str(exc))


def _record(message: Any) -> Record:
    return Record(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=message.key,
        value=message.value,
        timestamp_ms=round(message.timestamp * 1000),
    )
