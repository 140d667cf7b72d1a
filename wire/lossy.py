"""Sends what may be lost, in order and without waiting: frames are asked for again (Attach), signals come again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from wire.bus import Producer
from wire.errors import BusError

_log = logging.getLogger(__name__)
KEPT = 20_000
"""records that may wait while the log is away; then the oldest are dropped"""


class LossySender:
    """One producer's queue."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._waiting: deque[tuple[str, bytes, bytes | None, int | None]] = deque(maxlen=KEPT)
        self._wake = asyncio.Event()

    def put(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None) -> None:
        """Send it, after everything put before."""
        self._waiting.append((topic, value, key, partition))
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                topic, value, key, partition = self._waiting.popleft()
                try:
                    ack = await self._producer.send(topic, value, key=key, partition=partition)
                    ack.add_done_callback(_noted)
                except (BusError, ValueError) as exc:
                    _log.info("a record for %s could not be sent: %s", topic, exc)


def _noted(ack: asyncio.Future[int]) -> None:
    if not ack.cancelled() and ack.exception() is not None:
        _log.info("a record that may be lost was lost: %s", ack.exception())
