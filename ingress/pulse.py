"""Whether the log answers. Judged by what was sent and not acknowledged, so that a pause of ours is no outage."""

from __future__ import annotations

from wire.clock import Clock

BEATS = 3
"""so many signals in a row unacknowledged, and"""
AWAY_MS = 3_000
"""so long since anything was: then the log is away"""


class Pulse:
    """Told of each second's signal and of every acknowledgement."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._beat_ms = clock.monotonic_ms()
        self._waiting = 0

    def sent(self) -> None:
        """A signal was sent, or would have been."""
        self._waiting += 1

    def beat(self) -> None:
        """The log has just acknowledged something."""
        self._beat_ms = self._clock.monotonic_ms()
        self._waiting = 0

    def age_ms(self) -> float:
        """How long ago the log last acknowledged anything."""
        return self._clock.monotonic_ms() - self._beat_ms

    def log_is_away(self) -> bool:
        """Whether waiting for the log is pointless just now."""
        return self._waiting >= BEATS and self.age_ms() >= AWAY_MS
