"""Which readers of frames are alive, by their signals (R4). Pure.

Silence says something about a reader only while the log works. So time is measured by this worker's own signals as
they come back through the log: while they don't, it stands still.
"""

from __future__ import annotations

from collections.abc import Iterable

from wire.messages import DemandSignal, EngineSignal, ReplyTo, Signal


class Presence:
    """When each reader was last heard, in the time of this worker's own signals."""

    def __init__(self, engine: str, incarnation: str, grace_ms: int) -> None:
        self._engine, self._incarnation, self._grace_ms = engine, incarnation, grace_ms
        self._log_ms: int | None = None
        self._heard_ms: dict[ReplyTo, int] = {}

    def hear(self, signal: Signal) -> None:
        """Take a signal as read from the log."""
        if isinstance(signal, EngineSignal):
            if signal.engine == self._engine and signal.incarnation == self._incarnation:
                self._log_ms = max(self._log_ms or 0, signal.at_ms)
        elif isinstance(signal, DemandSignal):
            reader = ReplyTo(region=signal.region, slot=signal.slot, incarnation=signal.incarnation)
            self._heard_ms[reader] = self._log_ms or 0

    def vanished(self, readers: Iterable[ReplyTo]) -> list[ReplyTo]:
        """Those of `readers` that were silent for longer than the grace. One never heard counts from now on."""
        now_ms = self._log_ms
        if now_ms is None:
            return []
        waited_for = set(readers)
        for reader in waited_for:
            if not self._heard_ms.get(reader):
                self._heard_ms[reader] = now_ms
        self._heard_ms = {
            reader: heard_ms
            for reader, heard_ms in self._heard_ms.items()
            if reader in waited_for or now_ms - heard_ms <= self._grace_ms
        }
        return [reader for reader in waited_for if now_ms - self._heard_ms[reader] > self._grace_ms]
