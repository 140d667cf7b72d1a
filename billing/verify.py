"""Whether the ledger says what the journals say: every finished attempt, token for token, nano-dollar for nano-dollar.

Reads every partition of every journal as it is now, by the fold that takeover and resume use, and compares each window
of finished attempts with the ledger's lines of that window, both ways. What the ledger lacks is asked for again for a
while: usage may still be on its way. Memory is bounded by what runs at once and by what is named in the report.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from billing.charge import Line
from billing.compare import Difference, Window, absent, broken, compare, orphans_without_line
from billing.ledger import Ledger
from billing.prices import UNPRICED, Price
from billing.walk import Walk
from wire.bus import Bus, Partition, Reader
from wire.clock import Clock
from wire.fleet import BadFleet, Fleet
from wire.messages import Usage
from wire.topics import JOURNAL_PREFIX, USAGE, journal_fleet

LEDGER_GROUP = "ledger"
MAX_NAMED = 1_000
MAX_MISSING = 100_000
WINDOW_FINISHES = 1_000
ROWS_AT_ONCE = 5_000
WAIT_MS = 10_000
RETRY_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found."""

    partitions: int
    """of journals"""
    records: int
    finished: int
    """attempts that finished in them"""
    lines: int
    """of the ledger, that belong to them"""
    unpriced: int
    """of these lines, billable ones without a price"""
    pending: int
    """attempts not in the ledger, while the ledger has not read all usage yet"""
    differences: tuple[Difference, ...]
    """at most MAX_NAMED of them"""
    difference_count: int

    @property
    def content(self) -> bool:
        """Whether journals and ledger agree, with nothing outstanding."""
        return self.difference_count == 0 and self.pending == 0


@dataclass(slots=True)
class _Tally:
    partitions: int = 0
    records: int = 0
    finished: int = 0
    lines: int = 0
    unpriced: int = 0
    difference_count: int = 0
    named: list[Difference] = field(default_factory=list)
    missing: list[Usage] = field(default_factory=list)

    def differ(self, differences: Sequence[Difference]) -> None:
        self.difference_count += len(differences)
        self.named += differences[: max(0, MAX_NAMED - len(self.named))]

    def lack(self, usages: Sequence[Usage]) -> None:
        room = max(0, MAX_MISSING - len(self.missing))
        self.missing += usages[:room]
        self.differ([absent(usage) for usage in usages[room:]])

    def meet(self, lines: Sequence[Line]) -> None:
        self.lines += len(lines)
        self.unpriced += sum(line.billable and line.price_id == UNPRICED for line in lines)

    def report(self, pending: int) -> Report:
        return Report(
            partitions=self.partitions,
            records=self.records,
            finished=self.finished,
            lines=self.lines,
            unpriced=self.unpriced,
            pending=pending,
            differences=tuple(self.named),
            difference_count=self.difference_count,
        )


async def verify(bus: Bus, ledger: Ledger, clock: Clock, *, wait_ms: int = WAIT_MS) -> Report:
    """Compare all journals of the bus with the ledger. Waits up to `wait_ms` for usage that is on its way.

    Unavailable and LedgerAway when one of the two can't be read.
    """
    admin = await bus.admin()
    reader = await bus.reader(client_id="verify")
    tally, books = _Tally(), _Books(ledger)
    try:
        for topic in sorted(t for t in await admin.topics() if t.startswith(JOURNAL_PREFIX)):
            for number in range(await admin.partitions(topic) or 0):
                await _partition(reader, books, Partition(topic, number), tally)
        await _wait_for_missing(books, clock, clock.monotonic_ms() + wait_ms, tally)
        pending = len(tally.missing) if tally.missing and await _lag(bus, reader) > 0 else 0
    finally:
        await reader.stop()
        await admin.stop()
    if not pending:
        tally.differ([absent(usage) for usage in tally.missing])
    return tally.report(pending)


class _Books:
    """The ledger as `verify` reads it: the lines of a window, and the prices they were rated with."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.prices: dict[str, Price] = {}

    async def lines(self, window: Window) -> list[Line]:
        """The lines of attempts that finished in a window; `prices` then knows every adopted price they name."""
        found = await self._attempts(window)
        if {line.price_id for line in found} - self.prices.keys() - {UNPRICED}:
            # asked for afterwards: a price is adopted before the first line that is rated with it is written
            adopted = await asyncio.to_thread(self._ledger.adopted_prices)
            self.prices = {price.price_id: price for price in adopted}
        return found

    async def _attempts(self, window: Window) -> list[Line]:
        found: list[Line] = []
        start, end = window.from_offset, window.to_offset
        while start < end:
            page = await asyncio.to_thread(
                self._ledger.attempts_between, window.fleet, window.shard, start, end, ROWS_AT_ONCE
            )
            if len(page) < ROWS_AT_ONCE:
                return [*found, *page]
            # the last offset may go on beyond the page: it is read again whole
            last = page[-1].usage.finish_offset
            found += [line for line in page if line.usage.finish_offset < last or last == start]
            start = last if last > start else last + 1
        return found


async def _partition(reader: Reader, books: _Books, at: Partition, tally: _Tally) -> None:
    tally.partitions += 1
    try:
        fleet = journal_fleet(at.topic)
    except BadFleet as exc:
        tally.differ([broken(at.topic, at.partition, 0, f"is no fleet's: {exc}")])
        return
    walk = Walk(fleet, at, WINDOW_FINISHES)
    async for window in walk.windows(reader):
        lines = await books.lines(window)
        differences, missing, met = compare(window, lines, books.prices)
        tally.finished += len(window.usages) + len(window.orphans)
        tally.differ(differences)
        tally.differ(orphans_without_line(window, met))
        tally.lack(missing)
        tally.meet(met)
    tally.records += walk.records
    tally.differ(walk.differences)


async def _wait_for_missing(books: _Books, clock: Clock, until_ms: float, tally: _Tally) -> None:
    """Ask again for what the ledger lacked until it is there or the time is over."""
    while tally.missing and clock.monotonic_ms() < until_ms:
        await asyncio.sleep(RETRY_S)
        sought, tally.missing = tally.missing, []
        for window in windows_of(sought):
            ours = [
                line
                for line in await books.lines(window)
                if (line.usage.request_id, line.usage.attempt) in window.usages
            ]
            differences, missing, met = compare(window, ours, books.prices)
            tally.differ(differences)
            tally.lack(missing)
            tally.meet(met)


def windows_of(usages: Sequence[Usage]) -> list[Window]:
    """The usages as windows of their journals."""
    by_partition: dict[tuple[Fleet, int], list[Usage]] = defaultdict(list)
    for usage in usages:
        by_partition[usage.fleet, usage.shard].append(usage)
    return [
        Window(
            fleet=fleet,
            shard=shard,
            from_offset=min(usage.finish_offset for usage in group),
            to_offset=max(usage.finish_offset for usage in group) + 1,
            usages={(usage.request_id, usage.attempt): usage for usage in group},
            orphans={},
        )
        for (fleet, shard), group in by_partition.items()
    ]


async def _lag(bus: Bus, reader: Reader) -> int:
    """Usage records that the ledger has not committed."""
    admin = await bus.admin()
    try:
        count = await admin.partitions(USAGE) or 0
        commits = await admin.group_commits(LEDGER_GROUP)
    finally:
        await admin.stop()
    partitions = [Partition(USAGE, number) for number in range(count)]
    ends = await reader.end_offsets(partitions)
    begins = await reader.beginning_offsets(partitions)
    return sum(end - (commits[at].offset if at in commits else begins[at]) for at, end in ends.items())
