"""The one way from the ingress to the shards: Requests, Cancels and Attaches leave in the order they were put.

One producer carries them all, so that on a shard a Cancel never overtakes its Request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ingress.life import Target
from ingress.pulse import Pulse
from wire.bus import Producer
from wire.clock import Clock
from wire.codec import encode
from wire.errors import BusError, SendUnknown, Unavailable, UnknownTopic
from wire.fleet import Fleet
from wire.messages import Attach, Cancel, Request
from wire.topics import FleetTopics

log = logging.getLogger(__name__)
RETRY_MS = 500
RETRY_FOR_MS = 60_000
"""how long a Cancel that can't be queued is tried again; a Request has long expired by then"""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message to a shard, and who hears of its acknowledgement."""

    target: Target
    message: Request | Cancel | Attach
    done: Callable[[BusError | None], None] | None = None


class Sender:
    """Sends parcels. `put` never waits; tasks of `run` do, one a fleet, so that a fleet whose topic can't be found

    keeps nobody else waiting."""

    def __init__(self, producers: Mapping[str, Producer], pulse: Pulse, clock: Clock) -> None:
        """`producers` by region, acks all."""
        self._producers = producers
        self._pulse = pulse
        self._clock = clock
        self._lanes: dict[Fleet, _Lane] = {}
        self._new_lanes: asyncio.Queue[_Lane] = asyncio.Queue()

    def put(self, parcel: Parcel) -> None:
        """Send this after all that was put for its fleet before."""
        fleet = parcel.target.fleet
        lane = self._lanes.get(fleet)
        if lane is None:
            producer = self._producers.get(fleet.region)
            lane = self._lanes[fleet] = _Lane(producer, FleetTopics(fleet).requests, self._pulse, self._clock)
            self._new_lanes.put_nowait(lane)
        lane.put(parcel)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                lane = await self._new_lanes.get()
                group.create_task(lane.run(), name=f"lane {lane.topic}")

    async def flush(self) -> None:
        """Once `run` has ended: hand what was put to the producers. Stopping them waits for the log."""
        for lane in self._lanes.values():
            await lane.flush()


class _Lane:
    """One fleet's parcels, in order."""

    def __init__(self, producer: Producer | None, topic: str, pulse: Pulse, clock: Clock) -> None:
        """`producer` None: there is no cluster of the fleet's region."""
        self.topic = topic
        self._producer = producer
        self._pulse = pulse
        self._clock = clock
        self._parcels: deque[Parcel] = deque()
        self._again: deque[tuple[float, Parcel]] = deque()
        self._filled = asyncio.Event()

    def put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._wait()
            while self._parcels:
                await self._send(self._parcels.popleft(), self._clock.monotonic_ms() + RETRY_FOR_MS)
            for _ in range(len(self._again)):
                until_ms, parcel = self._again.popleft()
                await self._send(parcel, until_ms)

    async def flush(self) -> None:
        while self._parcels:
            await self._send(self._parcels.popleft(), 0)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(RETRY_MS / 1000 if self._again else None):
                await self._filled.wait()
        except TimeoutError:
            return
        self._filled.clear()

    async def _send(self, parcel: Parcel, until_ms: float) -> None:
        try:
            sent = await self._queue(parcel)
        except Unavailable as exc:
            self._not_queued(parcel, until_ms, exc)
        except (UnknownTopic, ValueError) as exc:  # ValueError: a record over the topic's limit
            log.warning("a %s can't be sent to %s: %s", type(parcel.message).__name__, self.topic, exc)
            self._not_queued(parcel, 0, Unavailable("the shard can't be reached"))
        else:
            sent.add_done_callback(lambda future: self._acknowledged(parcel, future))

    async def _queue(self, parcel: Parcel) -> asyncio.Future[int]:
        if self._producer is None:
            raise UnknownTopic(self.topic)
        return await self._producer.send(self.topic, encode(parcel.message), partition=parcel.target.shard)

    def _not_queued(self, parcel: Parcel, until_ms: float, exc: Unavailable) -> None:
        if isinstance(parcel.message, Cancel) and self._clock.monotonic_ms() < until_ms:
            self._again.append((until_ms, parcel))
        elif parcel.done is not None:
            parcel.done(exc)

    def _acknowledged(self, parcel: Parcel, future: asyncio.Future[int]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None:
            self._pulse.beat()
        if parcel.done is not None:
            parcel.done(error if isinstance(error, BusError | None) else SendUnknown(str(error)))
