"""What was sent just now, told to the region's other ingresses, so that they don't all choose the same idle engine."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from routing.flights import TRAVEL_MS, Shard
from wire.bus import Producer, Record
from wire.clock import Clock
from wire.codec import encode
from wire.errors import BusError
from wire.messages import Dispatch, Dispatches, EngineSignal, ReplyTo
from wire.topics import dispatches

log = logging.getLogger(__name__)
COALESCE_S = 0.005
REMEMBER_MS = 2_000
"""engines signal several times a second; what a sibling sent longer ago is in their signals"""


class Broadcast:
    """Publishes this ingress's dispatches."""

    def __init__(self, producer: Producer, reply: ReplyTo, clock: Clock) -> None:
        """`producer`: acks leader."""
        self._producer = producer
        self._reply = reply
        self._clock = clock
        self._sent: list[Dispatch] = []
        self._filled = asyncio.Event()

    def note(self, dispatch: Dispatch) -> None:
        """A request was just sent."""
        self._sent.append(dispatch)
        self._filled.set()

    async def run(self) -> None:
        """Publish what was noted, a few milliseconds' worth at a time, until cancelled."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(COALESCE_S)
            self._filled.clear()
            sent, self._sent = tuple(self._sent), []
            message = Dispatches(
                ingress=f"{self._reply.region}/{self._reply.slot}",
                incarnation=self._reply.incarnation,
                at_ms=self._clock.now_ms(),
                sent=sent,
            )
            try:
                acked = await self._producer.send(dispatches(self._reply.region), encode(message))
            except BusError as exc:
                log.debug("dispatches can't be sent: %s", exc)
            else:
                acked.add_done_callback(_forget)


class Siblings:
    """What the other ingresses sent lately."""

    def __init__(self, incarnation: str, clock: Clock) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._recent: deque[tuple[int, Shard]] = deque()

    def heard(self, message: Dispatches, record: Record) -> None:
        """Take a record of the dispatches topic; one's own are skipped."""
        if message.incarnation != self._incarnation:
            self._recent.extend((message.at_ms, (one.fleet, one.shard)) for one in message.sent)

    def add_unseen(self, counts: dict[Shard, int], signals: dict[Shard, EngineSignal]) -> None:
        """Count in what is too young to be in its engine's last signal."""
        oldest_ms = self._clock.now_ms() - REMEMBER_MS
        while self._recent and self._recent[0][0] < oldest_ms:
            self._recent.popleft()
        for at_ms, shard in self._recent:
            signal = signals.get(shard)
            if signal is not None and at_ms > signal.at_ms - TRAVEL_MS:
                counts[shard] = counts.get(shard, 0) + 1


def _forget(acked: asyncio.Future[int]) -> None:
    # Whether siblings learnt of it matters to nobody here; asking keeps a failure from being reported as unseen.
    if not acked.cancelled():
        acked.exception()
