"""Readers in the background: a compacted topic as a dict (`Follower`), a stream of messages as calls (`Tail`).

Both read every partition there is when they start, survive the log's being away, and hand what can't be decoded to
`dead`. Neither ever blocks its owner.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from wire.bus import Bus, Partition, Producer, Reader, Record, Start
from wire.clock import Clock
from wire.codec import decode, encode
from wire.errors import BusError, DecodeError, Unavailable, UnknownTopic
from wire.messages import Dead
from wire.topics import DEAD

_log = logging.getLogger(__name__)
T = TypeVar("T")
Dump = Callable[[Record, str], Awaitable[None]]
"""takes a record that could not be decoded, and why"""
POLL_MS = 200
RETRY_S = 0.25


def dead_letters(producer: Producer, reader: str, clock: Clock) -> Dump:
    """Notes on topic `dead` where an undecodable record stands and why, and nothing of what it holds."""

    async def dump(record: Record, why: str) -> None:
        note = Dead(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            why=why,
            reader=reader,
            at_ms=clock.now_ms(),
        )
        try:
            await producer.send(DEAD, encode(note))
        except BusError:
            _log.warning("%s[%d] offset %d: %s; could not be noted on %r", *record.at, record.offset, why, DEAD)

    return dump


class _Background(abc.ABC):
    """One task that reads a topic from `start` until it is stopped."""

    def __init__(self, bus: Bus, topic: str, start: Start, dead: Dump) -> None:
        self._bus = bus
        self._topic = topic
        self._from = start
        self._dead = dead
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin reading in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"follow {self._topic}")

    async def stop(self) -> None:
        """End reading; what was read stays."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        reader = await self._bus.reader(client_id=f"follow-{self._topic}")
        try:
            partitions = await self._assigned(reader)
            await self._began()
            while True:
                for record in self._counting(await reader.poll(POLL_MS)):
                    await self._take(record)
                await self._polled(reader, partitions)
        finally:
            await reader.stop()

    async def _assigned(self, reader: Reader) -> tuple[Partition, ...]:
        while True:
            try:
                admin = await self._bus.admin()
                try:
                    count = await admin.partitions(self._topic)
                finally:
                    await admin.stop()
                if count is None:
                    raise UnknownTopic(self._topic)
                partitions = tuple(Partition(self._topic, number) for number in range(count))
                await reader.assign(dict.fromkeys(partitions, self._from))
                return partitions
            except (Unavailable, UnknownTopic) as exc:
                _log.info("can't follow %s yet: %s", self._topic, exc)
                await asyncio.sleep(RETRY_S)

    async def _take(self, record: Record) -> None:
        try:
            self._apply(record)
        except DecodeError as exc:
            await self._dead(record, exc.why)
        except Exception:
            # a reader that dies silently would be worse than one message lost on a fault of its handler
            _log.exception("%s[%d] offset %d was read, but could not be handled", *record.at, record.offset)

    def _counting(self, records: Sequence[Record]) -> Iterable[Record]:
        """Of the records that came together, those that matter."""
        return records

    @abc.abstractmethod
    async def _began(self) -> None:
        """The positions are fixed."""

    @abc.abstractmethod
    async def _polled(self, reader: Reader, partitions: tuple[Partition, ...]) -> None:
        """One poll is done."""

    @abc.abstractmethod
    def _apply(self, record: Record) -> None:
        """Take one record; DecodeError if it can't be read."""


class Follower(_Background, Generic[T]):
    """A compacted topic as a dict: key → latest message. `items` lags the log by a few milliseconds.

    `age_ms` tells how stale it may be: at that time in the past everything then in the log was known here.
    """

    def __init__(
        self,
        bus: Bus,
        topic: str,
        kind: Any,
        *,
        clock: Clock,
        dead: Dump,
        on_change: Callable[[str, T | None], None] | None = None,
        check_every_ms: int = 1_000,
    ) -> None:
        """`kind`: message class or union of `T`. `on_change` gets a key and its new message, None when it is gone; of
        several that came together only the last."""
        super().__init__(bus, topic, "earliest", dead)
        self._kind = kind
        self._clock = clock
        self._on_change = on_change
        self._check_every_ms = check_every_ms
        self._items: dict[str, T] = {}
        self._asked_ms = float("-inf")
        self._ends: dict[Partition, int] | None = None
        self._caught_up = asyncio.Event()
        self.checked_at_monotonic_ms: float | None = None
        """when the log was last asked for its end which was then reached here; None before the first time"""

    @property
    def items(self) -> Mapping[str, T]:
        """Latest message of every key. Changes as records come in."""
        return self._items

    @property
    def caught_up(self) -> bool:
        """Whether everything that was in the log when it was first asked has been read."""
        return self._caught_up.is_set()

    async def wait_caught_up(self) -> None:
        """Returns once `caught_up`."""
        await self._caught_up.wait()

    @property
    def age_ms(self) -> float:
        """How old what is known here may be; infinite before it has caught up."""
        if self.checked_at_monotonic_ms is None:
            return float("inf")
        return self._clock.monotonic_ms() - self.checked_at_monotonic_ms

    def _counting(self, records: Sequence[Record]) -> Iterable[Record]:
        # An hour of snapshots may wait when a process starts: of each key only the last is worth decoding.
        return {(record.partition, record.key): record for record in records}.values()

    async def _began(self) -> None:
        """What counts is when it has caught up."""

    async def _polled(self, reader: Reader, partitions: tuple[Partition, ...]) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._ends is None and now_ms - self._asked_ms >= self._check_every_ms:
            try:
                self._ends = await reader.end_offsets(partitions)
            except Unavailable:
                return
            # of the moment before asking: what came later may be missing from the answer
            self._asked_ms = now_ms
        if self._ends is not None and all(reader.position(at) >= end for at, end in self._ends.items()):
            self._ends = None
            self.checked_at_monotonic_ms = self._asked_ms
            self._caught_up.set()

    def _apply(self, record: Record) -> None:
        try:
            key = (record.key or b"").decode()
        except UnicodeDecodeError as exc:
            raise DecodeError("the key isn't UTF-8") from exc
        message: T | None = None
        if record.value is None:
            self._items.pop(key, None)
        else:
            message = decode(record.value, self._kind)
            assert message is not None
            self._items[key] = message
        if self._on_change is not None:
            self._on_change(key, message)


class Tail(_Background, Generic[T]):
    """A topic's messages as calls, from `start` on: each decoded message and the record it came in."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        kind: Any,
        handle: Callable[[T, Record], None],
        *,
        dead: Dump,
        start: Start = "latest",
    ) -> None:
        """`kind`: message class or union of `T`. `handle` must not take long."""
        super().__init__(bus, topic, start, dead)
        self._kind = kind
        self._handle = handle
        self._reading = asyncio.Event()

    async def wait_reading(self) -> None:
        """Returns once the position is fixed: what is sent after that is seen."""
        await self._reading.wait()

    async def _began(self) -> None:
        self._reading.set()

    async def _polled(self, reader: Reader, partitions: tuple[Partition, ...]) -> None:
        """A tail has no end to catch up with."""

    def _apply(self, record: Record) -> None:
        self._handle(decode(record.value, self._kind), record)
