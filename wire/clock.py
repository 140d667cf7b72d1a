"""Time as a value that is passed in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for what crosses processes, monotonic time for what is measured inside one."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, by the wall clock."""
        ...

    def monotonic_ms(self) -> float:
        """Milliseconds on a clock that never goes back; only differences mean anything."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic_ns() / 1_000_000


class ManualClock:
    """A clock that moves only when told to: for tests and for virtual time."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._start_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> float:
        return float(self._now_ms - self._start_ms)

    def advance(self, ms: int) -> None:
        """Move both clocks forward by `ms` milliseconds."""
        self._now_ms += ms
