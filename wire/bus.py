"""The log as Millstream uses it. `wire.kafka` and `wire.memory` implement it and pass one contract suite.

Order: a producer's sends to one partition reach it in the order of the calls. A reader sees a partition in the order
of its offsets. Nothing here retries a send whose outcome is unknown: only the caller knows what that means (R1, R3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from wire.topics import Acks, Topic


class Partition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record as read."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    """None is a tombstone: the key is gone"""
    timestamp_ms: int

    @property
    def at(self) -> Partition:
        return Partition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class AtOffset:
    """Start at this offset; below the log's start it means the start, past its end the end."""

    offset: int


@dataclass(frozen=True, slots=True)
class AtTime:
    """Start at the first record that isn't older than this."""

    timestamp_ms: int


Start = Literal["earliest", "latest"] | AtOffset | AtTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A group's committed position of a partition: `offset` is the next one to read."""

    offset: int
    metadata: str = ""


class Producer(Protocol):
    """Sends to one cluster. Idempotent where acks is "all". Rebuilds itself after a fatal error."""

    async def send(
        self, topic: str, value: bytes | None, *, key: bytes | None = None, partition: int | None = None
    ) -> asyncio.Future[int]:
        """Queue a record. Without `partition` the key's murmur2 hash chooses it, as Kafka's own clients do.

        Returns once the record is queued (in order); the future gives the acknowledged offset, or raises SendUnknown.
        While the log is away queued records wait; Unavailable when the queue is full or the topic's layout unknown.
        A record over the topic's limit raises ValueError.
        """
        ...

    async def flush(self) -> None:
        """Wait until everything queued is acknowledged or has failed."""
        ...

    async def stop(self) -> None:
        """Flush for a bounded time, then close; what isn't acknowledged by then raises SendUnknown."""
        ...


class Reader(Protocol):
    """Reads partitions it is told to; no group, no commits."""

    async def assign(self, starts: Mapping[Partition, Start]) -> None:
        """Read exactly these partitions, each from its start. When this returns the positions are fixed:

        a record produced afterwards to a partition started at "latest" will be read. Unavailable while the log is away.
        """
        ...

    async def poll(self, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        """Records in order of their offsets in each partition; empty after `timeout_ms` without any."""
        ...

    def position(self, partition: Partition) -> int:
        """The next offset to be read."""
        ...

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The offset after the last record of each, asked of the log now. Unavailable while it is away."""
        ...

    async def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first offset kept of each, asked of the log now. Unavailable while it is away."""
        ...

    async def stop(self) -> None: ...


class Assignee(Protocol):
    """Told when the group's proposal changes. Neither call may wait for anything slow."""

    async def assigned(self, partitions: frozenset[Partition]) -> None:
        """The whole set this member has now. Reading starts again at the committed offsets, unless `seek` says else."""
        ...

    async def revoked(self, partitions: frozenset[Partition]) -> None:
        """Taken away for now; after an eager rebalance most come back with the next `assigned`."""
        ...


class Member(Protocol):
    """A member of a consumer group. Static when it has an instance id: a restart gets its partitions back at once."""

    async def poll(self, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        """Records of assigned partitions, from the committed offset on (the start where none is committed).

        NotMember, for good, once another process has joined with this member's instance id.
        """
        ...

    def assignment(self) -> frozenset[Partition]:
        """What the group last proposed."""
        ...

    async def committed(self, partition: Partition) -> Commit | None:
        """The group's position, asked of the log. Unavailable while it is away."""
        ...

    async def commit(self, commits: Mapping[Partition, Commit]) -> None:
        """All in one request. NotMember when the group has moved on (nothing committed), Unavailable when it is away.

        An empty mapping checks membership only, where that can be asked.
        """
        ...

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stop returning records of these; survives no rebalance."""
        ...

    def resume(self, partitions: Iterable[Partition]) -> None: ...

    def seek(self, partition: Partition, offset: int) -> None:
        """Read on from here. The partition must be assigned."""
        ...

    async def stop(self, *, leave: bool = True) -> None:
        """Close. `leave` False keeps a static member's place for its session, for a restart."""
        ...


class Admin(Protocol):
    """Creates and describes topics."""

    async def create(self, topics: Iterable[Topic]) -> tuple[str, ...]:
        """Create those that don't exist; returns their names. Of others partition counts and times that are too low are
        raised, and all else stays as it is."""
        ...

    async def partitions(self, topic: str) -> int | None:
        """How many partitions a topic has; None if it doesn't exist."""
        ...

    async def topics(self) -> frozenset[str]:
        """Names of all topics but the broker's own."""
        ...

    async def group_commits(self, group: str) -> dict[Partition, Commit]:
        """A group's committed positions (for `millstream status`: lag is queue depth)."""
        ...

    async def stop(self) -> None: ...


class Bus(Protocol):
    """One region's cluster."""

    async def producer(self, *, acks: Acks = "all", linger_ms: int = 0, client_id: str = "") -> Producer: ...

    async def reader(self, *, client_id: str = "") -> Reader: ...

    async def member(
        self,
        group: str,
        topics: Sequence[str],
        assignee: Assignee,
        *,
        instance_id: str | None = None,
        session_timeout_ms: int = 10_000,
        client_id: str = "",
    ) -> Member:
        """Join a group. Topics of one call are assigned alike: who has partition 3 of one has it of all."""
        ...

    async def admin(self) -> Admin: ...
