"""A partition of a journal from its first record to its end as of now, in windows of finished attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from billing.compare import Difference, Window, broken
from wire import codec
from wire.bus import Partition, Reader, Record
from wire.errors import DecodeError, Unavailable
from wire.fleet import Fleet
from wire.journal import Fold, JournalBroken, usage_of
from wire.messages import Claim, Finish, Journal, Usage

POLL_MS = 500
STUCK_POLLS = 60
"""Polls in a row without a record, short of the end, after which the log counts as away"""


@dataclass(slots=True)
class Walk:
    """One partition's walk; `differences` grows with what the journal itself gets wrong."""

    fleet: Fleet
    at: Partition
    window_finishes: int = 1_000
    records: int = 0
    differences: list[Difference] = field(default_factory=list)
    _fold: Fold = field(default_factory=Fold)
    _usages: dict[tuple[str, int], Usage] = field(default_factory=dict)
    _orphans: dict[int, Finish] = field(default_factory=dict)

    async def windows(self, reader: Reader) -> AsyncIterator[Window]:
        """Every window in the order of the offsets, together all of the partition. Unavailable when the log is away."""
        start = (await reader.beginning_offsets([self.at]))[self.at]
        end = (await reader.end_offsets([self.at]))[self.at]
        await reader.assign({self.at: "earliest"})
        idle = 0
        while reader.position(self.at) < end:
            records = await reader.poll(POLL_MS)
            idle = 0 if records else idle + 1
            if idle >= STUCK_POLLS:
                raise Unavailable(f"{self.at.topic}[{self.at.partition}] can't be read to its end")
            for record in records:
                if record.offset >= end:
                    break
                self._take(record)
                if len(self._usages) + len(self._orphans) >= self.window_finishes:
                    yield self._window(start, record.offset + 1)
                    start = record.offset + 1
        if start < end:
            yield self._window(start, end)

    def _take(self, record: Record) -> None:
        self.records += 1
        try:
            entry: Journal = codec.decode(record.value, Journal)
        except DecodeError as exc:
            self._say(record, f"a record that can't be decoded: {exc.why}")
            return
        epoch = self._fold.epoch
        try:
            attempt = self._fold.apply(record.offset, entry)
        except JournalBroken as exc:
            self._say(record, f"contradicts itself: {exc}")
            return
        if not isinstance(entry, Claim) and epoch is not None and self._fold.epoch != epoch:
            # what was read so far was written by an owner that no longer was one (see Fold)
            self._usages.clear()
            self._orphans.clear()
        if attempt is not None:
            usage = usage_of(self.fleet, self.at.partition, attempt)
            self._usages[usage.request_id, usage.attempt] = usage
        elif isinstance(entry, Finish) and entry.epoch == self._fold.epoch:
            self._orphans[record.offset] = entry
        self._forget_finished()

    def _forget_finished(self) -> None:
        """Keep only what still runs: a Carry brings finished attempts back, and they were compared already."""
        if len(self._fold.attempts) > len(self._fold.open):
            for ref in [ref for ref, attempt in self._fold.attempts.items() if attempt.finish is not None]:
                self._fold.forget(ref)

    def _window(self, start: int, end: int) -> Window:
        window = Window(
            fleet=self.fleet,
            shard=self.at.partition,
            from_offset=start,
            to_offset=end,
            usages=self._usages,
            orphans=self._orphans,
        )
        self._usages, self._orphans = {}, {}
        return window

    def _say(self, record: Record, journal: str) -> None:
        self.differences.append(broken(record.topic, record.partition, record.offset, journal))
