"""The log of the in-memory bus: what all its processes share, and the faults a test may order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from wire.bus import AtOffset, Partition, Record, Start
from wire.clock import Clock
from wire.errors import Unavailable, UnknownTopic
from wire.memory_group import Group
from wire.topics import Topic

Fault = Literal["lands", "vanishes"]


@dataclass(slots=True)
class Stored:
    """One partition's records; `records[0]` stands at offset `start`."""

    start: int = 0
    records: deque[Record] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.start + len(self.records)


class MemoryLog:
    """A log in memory. Every `wire.memory.MemoryBus` given the same one is another process on the same cluster.

    Nothing happens by itself, apart from time-outs of polls: outages, lost acknowledgements, expired sessions and
    deletions happen when a test says so.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.available = True
        self.holding_acks = False
        self._stored: dict[Partition, Stored] = {}
        self._faults: dict[str, deque[Fault]] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    # ------------------------------------------------ what a test may order

    def away(self) -> None:
        """Make the log unreachable: queued records wait, polls are empty, questions raise Unavailable."""
        self.available = False

    def back(self) -> None:
        """End the outage: what waited is appended, in order."""
        self.available = True
        self.stir()

    def lose_ack(self, topic: str, *, lands: bool = True, times: int = 1) -> None:
        """The next `times` records sent to `topic` raise SendUnknown; they are in the log if `lands`."""
        self._faults.setdefault(topic, deque()).extend(["lands" if lands else "vanishes"] * times)

    def hold_acks(self) -> None:
        """Append records from now on, but acknowledge none before `release_acks`."""
        self.holding_acks = True

    def release_acks(self) -> None:
        """Acknowledge everything held, and go on at once from now on."""
        self.holding_acks = False
        self.stir()

    async def expire(self, group: str, instance_id: str) -> None:
        """End the session of a static member: the group goes on without it; it notices at its next call."""
        await self.group(group).expire(instance_id)

    def delete_before(self, partition: Partition, offset: int) -> None:
        """Drop a partition's records below `offset`, as retention does."""
        stored = self.stored(partition)
        while stored.start < offset and stored.records:
            stored.records.popleft()
            stored.start += 1

    # ------------------------------------------------ what the bus does

    def check(self) -> None:
        """Unavailable during an outage."""
        if not self.available:
            raise Unavailable("the log is away")

    def topic(self, name: str) -> Topic:
        """UnknownTopic unless it was created."""
        if name not in self.topics:
            raise UnknownTopic(name)
        return self.topics[name]

    def group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group(self.partition_count))

    def partition_count(self, topic: str) -> int:
        return self.topics[topic].partitions if topic in self.topics else 0

    def stored(self, at: Partition) -> Stored:
        """UnknownTopic where there is no such partition."""
        if not 0 <= at.partition < self.topic(at.topic).partitions:
            raise UnknownTopic(f"{at.topic}[{at.partition}]")
        return self._stored.setdefault(at, Stored())

    def next_fault(self, topic: str) -> Fault | None:
        faults = self._faults.get(topic)
        return faults.popleft() if faults else None

    def append(self, at: Partition, key: bytes | None, value: bytes | None) -> int:
        """The new record's offset."""
        stored, offset = self.stored(at), self.stored(at).end
        stored.records.append(
            Record(
                topic=at.topic,
                partition=at.partition,
                offset=offset,
                key=key,
                value=value,
                timestamp_ms=self.clock.now_ms(),
            )
        )
        return offset

    def read(self, at: Partition, offset: int, limit: int) -> list[Record]:
        """Up to `limit` records from `offset` on."""
        stored = self.stored(at)
        first = offset - stored.start
        return [stored.records[i] for i in range(first, min(first + limit, len(stored.records)))]

    def resolve(self, at: Partition, start: Start) -> int:
        """The offset a start means now."""
        stored = self.stored(at)
        match start:
            case "earliest":
                return stored.start
            case "latest":
                return stored.end
            case AtOffset(offset):
                return min(max(offset, stored.start), stored.end)
        late = (r.offset for r in stored.records if r.timestamp_ms >= start.timestamp_ms)
        return next(late, stored.end)

    # ------------------------------------------------ waiting

    def on_stir(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever something may have changed; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def stir(self) -> None:
        """Something changed: producers look at what they hold, polls at the log."""
        for listener in list(self._listeners):
            listener()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def changed(self, timeout_s: float) -> None:
        """Wait until something changes, for at most so long."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait({future}, timeout=timeout_s)
        finally:
            self._waiting.discard(future)


class Cursor:
    """Positions in a log, and what a poll takes from them. The reader's and the member's common half."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.positions: dict[Partition, int] = {}
        self.paused: set[Partition] = set()

    def restart(self, positions: dict[Partition, int]) -> None:
        self.positions = dict(positions)
        self.paused.clear()

    def take(self, max_records: int) -> list[Record]:
        """Records that are there, in order of their offsets; a partition that gave moves to the back."""
        taken: list[Record] = []
        if not self._log.available:
            return taken
        for at in list(self.positions):
            if at in self.paused or len(taken) >= max_records:
                continue
            # deleted under the reader: on from the log's start
            position = max(self.positions[at], self._log.stored(at).start)
            records = self._log.read(at, position, max_records - len(taken))
            if records:
                del self.positions[at]
                position = records[-1].offset + 1
            self.positions[at] = position
            taken += records
        return taken

    async def poll(self, timeout_ms: int, max_records: int) -> list[Record]:
        """What `take` gives, waiting for it for at most `timeout_ms`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1000
        while True:
            records = self.take(max_records)
            left_s = until - loop.time()
            if records or left_s <= 0:
                return records
            await self._log.changed(left_s)


def ends(log: MemoryLog, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """The offset after the last record of each. Unavailable during an outage."""
    log.check()
    return {at: log.stored(at).end for at in partitions}


def beginnings(log: MemoryLog, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """The first offset kept of each. Unavailable during an outage."""
    log.check()
    return {at: log.stored(at).start for at in partitions}
