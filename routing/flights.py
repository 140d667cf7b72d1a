"""What one ingress has in flight, by shard.

A set of attempts rather than a counter: an attempt that ends twice, or after its engine was made anew under the same
name, can't make a count negative or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from wire.fleet import Fleet
from wire.messages import EngineSignal

TRAVEL_MS = 20
"""A send this much older than a signal may still be missing from it"""

Shard = tuple[Fleet, int]


Name = tuple[str, int]


class Flights:
    """Attempts that were sent and haven't ended."""

    def __init__(self) -> None:
        self._open: dict[Name, Shard] = {}
        self._counts: dict[Shard, int] = {}
        self._young: dict[Shard, dict[Name, int]] = {}
        """attempts that no signal has counted yet, the oldest first, and when they were sent"""

    def sent(self, request_id: str, attempt: int, shard: Shard, now_ms: int) -> None:
        """An attempt went to a shard. Sent again it is counted where it went last."""
        self.ended(request_id, attempt)
        self._open[request_id, attempt] = shard
        self._counts[shard] = self._counts.get(shard, 0) + 1
        self._young.setdefault(shard, {})[request_id, attempt] = now_ms

    def ended(self, request_id: str, attempt: int) -> None:
        """An attempt is over; the second time, or for one that was never sent, nothing happens."""
        shard = self._open.pop((request_id, attempt), None)
        if shard is None:
            return
        self._counts[shard] -= 1
        if not self._counts[shard]:
            del self._counts[shard]
        young = self._young.get(shard, {})
        young.pop((request_id, attempt), None)
        if not young:
            self._young.pop(shard, None)

    @property
    def counts(self) -> Mapping[Shard, int]:
        """Unended attempts by shard: `choose`'s in_flight."""
        return self._counts

    def unseen(self, signals: Mapping[Shard, EngineSignal]) -> dict[Shard, int]:
        """Attempts too young for their engine's last signal to count them: `choose`'s unseen.

        What a signal has counted once is not looked at again: a shard's signals only get newer.
        """
        counts: dict[Shard, int] = {}
        for shard, young in list(self._young.items()):
            signal = signals.get(shard)
            if signal is None:
                continue
            while young and next(iter(young.values())) <= signal.at_ms - TRAVEL_MS:
                del young[next(iter(young))]
            if young:
                counts[shard] = len(young)
            else:
                del self._young[shard]
        return counts
