"""Snapshots to the topic `weights`, once an interval; never more than one round of them waits for the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from wire.bus import Producer
from wire.codec import encode
from wire.errors import BusError
from wire.messages import Snapshot
from wire.topics import WEIGHTS, weights_key

log = logging.getLogger("millstream.control")


class Publisher:
    """Publishes over a producer. A round that comes while the one before is unacknowledged is skipped: when the log
    comes back, readers get weights of that moment and no procession of old ones."""

    def __init__(self, producer: Producer) -> None:
        """`producer`: acks all."""
        self._producer = producer
        self._waiting: set[asyncio.Future[int]] = set()
        self._away = False

    async def publish(self, snapshots: Iterable[Snapshot]) -> bool:
        """Queue a round; False if it was skipped or the log can't take it."""
        if self._waiting:
            return False
        try:
            for snapshot in snapshots:
                key = weights_key(snapshot.model, snapshot.region)
                sent = await self._producer.send(WEIGHTS, encode(snapshot), key=key)
                self._waiting.add(sent)
                sent.add_done_callback(self._done)
        except BusError as exc:
            self._say(exc)
            return False
        return True

    def _done(self, sent: asyncio.Future[int]) -> None:
        self._waiting.discard(sent)
        self._say(None if sent.cancelled() else sent.exception())

    def _say(self, error: BaseException | None) -> None:
        """Say once that weights don't reach the log, and once that they do again."""
        if error is not None and not self._away:
            log.warning("weights don't reach the log, routing goes on with the last ones: %s", error)
        elif error is None and self._away:
            log.info("weights reach the log again")
        self._away = error is not None
