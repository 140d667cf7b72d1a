"""One world of the bus contract: the log of one kind, and everything a test opens on it, closed at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from wire.bus import Bus, Commit, Member, Partition, Producer, Reader, Record
from wire.clock import ManualClock
from wire.topics import Acks, Topic


@dataclass
class Told:
    """An assignee that writes down what it is told."""

    events: list[tuple[str, frozenset[Partition]]] = field(default_factory=list)
    on_assigned: Callable[[frozenset[Partition]], Awaitable[None]] | None = None

    async def assigned(self, partitions: frozenset[Partition]) -> None:
        self.events.append(("assigned", partitions))
        if self.on_assigned is not None:
            await self.on_assigned(partitions)

    async def revoked(self, partitions: frozenset[Partition]) -> None:
        self.events.append(("revoked", partitions))


class World:
    """What a test of the contract works with; `bus()` is another process each time."""

    def __init__(self, bus: Callable[[], Bus], clock: ManualClock, suffix: str) -> None:
        self.bus = bus
        self.clock = clock
        self._suffix = suffix
        self._open = contextlib.AsyncExitStack()

    def name(self, name: str) -> str:
        return f"{name}.{self._suffix}"

    async def topic(self, name: str, **settings: Any) -> str:
        """Create a topic of this test's own; its full name."""
        settings = {"partitions": 1, "retention_ms": 3_600_000} | settings
        topic = Topic(name=self.name(name), **settings)
        admin = await self.bus().admin()
        await admin.create([topic])
        await admin.stop()
        return topic.name

    async def producer(self, acks: Acks = "all", linger_ms: int = 0) -> Producer:
        producer = await self.bus().producer(acks=acks, linger_ms=linger_ms)
        self._open.push_async_callback(producer.stop)
        return producer

    async def reader(self) -> Reader:
        reader = await self.bus().reader()
        self._open.push_async_callback(reader.stop)
        return reader

    async def member(
        self, group: str, topics: Sequence[str], told: Told | None = None, instance_id: str | None = None
    ) -> Member:
        member = await self.bus().member(
            self.name(group), topics, told or Told(), instance_id=instance_id, session_timeout_ms=6_000
        )
        self._open.push_async_callback(member.stop)
        return member

    async def close(self) -> None:
        await self._open.aclose()


async def until(condition: Callable[[], bool], *members: Member, within_s: float = 30.0) -> None:
    """Poll the members (they are owed it) until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            for member in members:
                await member.poll(10)
            await asyncio.sleep(0.01)


async def take(source: Reader | Member, count: int, within_s: float = 30.0) -> list[Record]:
    """The next `count` records."""
    records: list[Record] = []
    async with asyncio.timeout(within_s):
        while len(records) < count:
            records += await source.poll(100)
    return records


def values(records: Sequence[Record]) -> list[bytes | None]:
    return [record.value for record in records]


def at(offset: int, metadata: str = "") -> Commit:
    return Commit(offset=offset, metadata=metadata)
