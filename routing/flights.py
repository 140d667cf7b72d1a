"""What one ingress has in flight, by shard.

A set of attempts rather than a counter: an attempt that ends twice, or after its engine was made anew under the same
name, can't make a count negative or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wire.fleet import Fleet
from wire.messages import EngineSignal

TRAVEL_MS = 20
"""A send this much older than a signal may still be missing from it"""

Shard = tuple[Fleet, int]


@dataclass(frozen=True, slots=True)
class _Flight:
    shard: Shard
    sent_ms: int


class Flights:
    """Attempts that were sent and haven't ended."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Flight] = {}
        self._counts: dict[Shard, int] = {}

    def sent(self, request_id: str, attempt: int, shard: Shard, now_ms: int) -> None:
        """An attempt went to a shard. Sent again it is counted where it went last."""
        self.ended(request_id, attempt)
        self._open[request_id, attempt] = _Flight(shard, now_ms)
        self._counts[shard] = self._counts.get(shard, 0) + 1

    def ended(self, request_id: str, attempt: int) -> None:
        """An attempt is over; the second time, or for one that was never sent, nothing happens."""
        flight = self._open.pop((request_id, attempt), None)
        if flight is None:
            return
        self._counts[flight.shard] -= 1
        if not self._counts[flight.shard]:
            del self._counts[flight.shard]

    @property
    def counts(self) -> Mapping[Shard, int]:
        """Unended attempts by shard: `choose`'s in_flight."""
        return self._counts

    def unseen(self, signals: Mapping[Shard, EngineSignal]) -> dict[Shard, int]:
        """Attempts too young for their engine's last signal to count them: `choose`'s unseen."""
        counts: dict[Shard, int] = {}
        for flight in self._open.values():
            signal = signals.get(flight.shard)
            if signal is not None and flight.sent_ms > signal.at_ms - TRAVEL_MS:
                counts[flight.shard] = counts.get(flight.shard, 0) + 1
        return counts
