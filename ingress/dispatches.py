"""What was sent just now, told to the region's other ingresses, so that they don't all choose the same idle engine."""

from __future__ import annotations

import asyncio
import logging

from wire.bus import Producer
from wire.clock import Clock
from wire.codec import encode
from wire.errors import BusError
from wire.messages import Dispatch, Dispatches, ReplyTo
from wire.topics import dispatches

log = logging.getLogger(__name__)
COALESCE_S = 0.005


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


def _forget(acked: asyncio.Future[int]) -> None:
    # Whether siblings learnt of it matters to nobody here; asking keeps a failure from being reported as unseen.
    if not acked.cancelled():
        acked.exception()
