"""Frames from the engines: this ingress's slot of the replies topic, read from before the first request was sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ingress.metrics import Metrics
from wire.bus import Partition, Reader, Record
from wire.codec import decode
from wire.errors import BusError, DecodeError
from wire.follow import Dump
from wire.messages import Frames, ReplyTo
from wire.topics import replies

log = logging.getLogger(__name__)
POLL_MS = 500
RETRY_S = 0.25


class Replies:
    """Reads one partition. Frames for an earlier life of this slot are dropped."""

    def __init__(
        self, reader: Reader, reply: ReplyTo, take: Callable[[Frames], None], dead: Dump, metrics: Metrics
    ) -> None:
        """`take` gets each record's frames; it must neither raise nor take long."""
        self._reader = reader
        self._reply = reply
        self._take = take
        self._dead = dead
        self._metrics = metrics
        self.reading = asyncio.Event()
        """set once the position is fixed: nothing may be sent before, its answer could be missed"""

    async def run(self) -> None:
        """Read until cancelled."""
        await self._assign(Partition(replies(self._reply.region), self._reply.slot))
        self.reading.set()
        while True:
            for record in await self._reader.poll(POLL_MS):
                await self._record(record)

    async def stop(self) -> None:
        """Close the reader, once `run` has ended."""
        await self._reader.stop()

    async def _assign(self, partition: Partition) -> None:
        while True:
            try:
                await self._reader.assign({partition: "latest"})
                return
            except BusError as exc:
                log.info("can't read %s[%d] yet: %s", *partition, exc)
                await asyncio.sleep(RETRY_S)

    async def _record(self, record: Record) -> None:
        try:
            frames: Frames = decode(record.value, Frames)
        except DecodeError as exc:
            self._metrics.undecodable.inc()
            await self._dead(record, exc.why)
            return
        if frames.slot == self._reply.slot and frames.incarnation == self._reply.incarnation:
            self._take(frames)
