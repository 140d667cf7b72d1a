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
from wire.bus import Producer
from wire.clock import Clock
from wire.codec import encode
from wire.errors import BusError, SendUnknown, Unavailable, UnknownTopic
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


class Pulse:
    """When the log last acknowledged anything of ours."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._beat_ms = clock.monotonic_ms()

    def beat(self) -> None:
        """The log has just acknowledged something."""
        self._beat_ms = self._clock.monotonic_ms()

    def age_ms(self) -> float:
        """How long ago that was."""
        return self._clock.monotonic_ms() - self._beat_ms


class Sender:
    """Sends parcels. `put` never waits; `run` is the task that does."""

    def __init__(self, producers: Mapping[str, Producer], pulse: Pulse, clock: Clock) -> None:
        """`producers` by region, acks all."""
        self._producers = producers
        self._pulse = pulse
        self._clock = clock
        self._parcels: deque[Parcel] = deque()
        self._again: deque[tuple[float, Parcel]] = deque()
        self._filled = asyncio.Event()

    def put(self, parcel: Parcel) -> None:
        """Send this after all that was put before."""
        self._parcels.append(parcel)
        self._filled.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wait()
            while self._parcels:
                await self._send(self._parcels.popleft(), self._clock.monotonic_ms() + RETRY_FOR_MS)
            for _ in range(len(self._again)):
                until_ms, parcel = self._again.popleft()
                await self._send(parcel, until_ms)

    async def flush(self) -> None:
        """Send what was put so far and wait until the log has it or doesn't take it."""
        while self._parcels:
            await self._send(self._parcels.popleft(), 0)
        for producer in self._producers.values():
            await producer.flush()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(RETRY_MS / 1000 if self._again else None):
                await self._filled.wait()
        except TimeoutError:
            return
        self._filled.clear()

    async def _send(self, parcel: Parcel, until_ms: float) -> None:
        target = parcel.target
        try:
            sent = await self._producers[target.fleet.region].send(
                FleetTopics(target.fleet).requests, encode(parcel.message), partition=target.shard
            )
        except Unavailable as exc:
            self._not_queued(parcel, until_ms, exc)
            return
        except (UnknownTopic, ValueError, KeyError) as exc:
            # No topic or no cluster of this fleet's, or a record over the topic's limit: waiting won't help.
            log.warning("a %s for %s can't be sent: %s", type(parcel.message).__name__, target.fleet.name, exc)
            self._not_queued(parcel, 0, Unavailable("the shard can't be reached"))
            return
        sent.add_done_callback(lambda future: self._acknowledged(parcel, future))

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
