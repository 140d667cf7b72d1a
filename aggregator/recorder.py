"""Usage records in, ledger lines out: what the ledger app does with a batch. Knows no Faust.

The order is decode, rate, insert, and only then does the caller acknowledge: whatever happens in between, the batch
comes again, and recording it again changes nothing (R6). While the database is away the batch waits for it, for as
long as it takes; what can't be decoded or can't be true goes to `dead` and never holds the rest up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from billing.charge import Line, rate
from billing.errors import BadUsage, LedgerAway
from billing.ledger import Ledger
from billing.prices import UNPRICED, PriceBook
from wire import codec
from wire.bus import Record
from wire.clock import Clock
from wire.errors import DecodeError
from wire.follow import Dump
from wire.messages import Usages

log = logging.getLogger("millstream.ledger")

INSERT_LINES = 5_000
"""Lines of one insert at most"""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
SAY_AGAIN_MS = 30_000


class Metrics:
    """The ledger's metrics; names begin with millstream_ledger_."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lines = Counter("millstream_ledger_lines", "Lines written, replayed ones too", registry=registry)
        self.unpriced = Counter("millstream_ledger_unpriced", "Billable lines without a price", registry=registry)
        self.dead = Counter("millstream_ledger_dead", "Records and usages put on the topic dead", registry=registry)
        self.waiting = Gauge("millstream_ledger_waiting_lines", "Lines that wait for the database", registry=registry)
        self.away = Gauge("millstream_ledger_away", "1 while the database can't be reached", registry=registry)
        self.age = Histogram(
            "millstream_ledger_age_seconds",
            "From an attempt's Finish to its line",
            buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10, 60, 600),
            registry=registry,
        )


class Recorder:
    """Records batches, one at a time."""

    def __init__(self, ledger: Ledger, book: PriceBook, dump: Dump, clock: Clock, metrics: Metrics) -> None:
        self._ledger = ledger
        self._book = book
        self._dump = dump
        self._clock = clock
        self._metrics = metrics

    async def record(self, batch: Sequence[Record]) -> None:
        """When this returns every usage of the batch is a line of the ledger, or a record of `dead`."""
        lines, broken = rated(batch, self._book)
        for start in range(0, len(lines), INSERT_LINES):
            await self._insert(lines[start : start + INSERT_LINES])
        for record, why in broken:
            await self._bury(record, why)

    async def _insert(self, lines: Sequence[Line]) -> None:
        pause_s, said_ms, since_ms = FIRST_PAUSE_S, None, self._clock.monotonic_ms()
        self._metrics.waiting.set(len(lines))
        while True:
            try:
                await asyncio.to_thread(self._ledger.insert, lines)
                break
            except LedgerAway as exc:
                now_ms = self._clock.monotonic_ms()
                self._metrics.away.set(1)
                if said_ms is None or now_ms - said_ms >= SAY_AGAIN_MS:
                    said_ms = now_ms
                    log.warning("%d lines wait since %d s: %s", len(lines), (now_ms - since_ms) // 1000, exc)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        if said_ms is not None:
            log.info("the database is back; %d lines are written", len(lines))
        self._count(lines)

    async def _bury(self, record: Record, why: str) -> None:
        # The record itself stays in `usage` for its retention, and this line says where.
        self._metrics.dead.inc()
        log.error("usage record %d/%d goes to the topic dead: %s", record.partition, record.offset, why)
        await self._dump(record, why)

    def _count(self, lines: Sequence[Line]) -> None:
        self._metrics.away.set(0)
        self._metrics.waiting.set(0)
        self._metrics.lines.inc(len(lines))
        self._metrics.unpriced.inc(sum(line.billable and line.price_id == UNPRICED for line in lines))
        now_ms = self._clock.now_ms()
        for line in lines:
            self._metrics.age.observe(max(0, now_ms - line.usage.finished_ms) / 1000)


def rated(batch: Sequence[Record], book: PriceBook) -> tuple[list[Line], list[tuple[Record, str]]]:
    """(lines in the order of the records, what can't be used and why). Pure."""
    lines: list[Line] = []
    broken: list[tuple[Record, str]] = []
    for record in batch:
        try:
            usages: Usages = codec.decode(record.value, Usages)
        except DecodeError as exc:
            broken.append((record, exc.why))
            continue
        for index, usage in enumerate(usages.entries):
            try:
                lines.append(rate(usage, book))
            except BadUsage as exc:
                broken.append((record, f"entry {index}: {exc.why}"))
    return lines, broken
