"""Events on their way from the log's reader to one client's connection: bounded, and never silent for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from ingress.chunks import PING


class Outlet:
    """A queue of events with one taker. It never blocks who puts: a reader that is too slow overflows it instead."""

    def __init__(self, limit_bytes: int, keep_alive_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[bytes] = deque()
        self._size_bytes = 0
        self._limit_bytes = limit_bytes
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._keep_alive_s = keep_alive_s
        self._last_s = self._loop.time()
        self._alarm: asyncio.TimerHandle | None = None
        self.overflowed: asyncio.Future[None] = self._loop.create_future()
        """done once more waited than may wait"""

    def put(self, events: Iterable[bytes]) -> None:
        """Add events; dropped once closed or overflowed."""
        if self._closed:
            return
        for event in events:
            self._events.append(event)
            self._size_bytes += len(event)
        if self._size_bytes > self._limit_bytes:
            self._events.clear()
            self.overflowed.set_result(None)
            self.close()
        self._wake()

    def ping(self) -> None:
        """Say that the stream is alive."""
        self.put([PING])

    def close(self) -> None:
        """Nothing follows; what was put before is still taken."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._wake()

    def next(self) -> bytes | None:
        """The next event, or None if there is none now."""
        if not self._events:
            return None
        event = self._events.popleft()
        self._size_bytes -= len(event)
        self._last_s = self._loop.time()
        return event

    async def more(self) -> bool:
        """Wait until there is an event, a comment after a silence included; False at the end."""
        while not self._events:
            if self._closed:
                return False
            if self._alarm is None:
                self._set_alarm(self._keep_alive_s)
            self._waiter = self._loop.create_future()
            await self._waiter
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_alarm(self, after_s: float) -> None:
        self._alarm = self._loop.call_later(after_s, self._ring)

    def _ring(self) -> None:
        # The alarm isn't moved with every event: it looks when it rings whether there was silence, and for how long.
        if self._closed:
            return
        silent_s = self._loop.time() - self._last_s
        if silent_s < self._keep_alive_s:
            self._set_alarm(self._keep_alive_s - silent_s)
            return
        if not self._events:
            self.ping()
        self._set_alarm(self._keep_alive_s)
