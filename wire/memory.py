"""The bus in memory: the same answers as `wire.kafka`, held to them by the same contract suite."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from wire.bus import Assignee, Commit, Partition, Record, Start
from wire.errors import NotMember, SendUnknown, Unavailable
from wire.memory_group import Seat
from wire.memory_log import Cursor, MemoryLog, beginnings, ends
from wire.records import check_record, partition_of
from wire.topics import Acks, Topic

QUEUE_BYTES = 64 * 1024 * 1024
METADATA_BYTES = 4096
"""what a broker takes as a commit's metadata"""


@dataclass(slots=True, eq=False)
class _Sent:
    at: Partition
    key: bytes | None
    value: bytes | None
    size: int
    ack: asyncio.Future[int]
    offset: int | None = None


class MemoryProducer:
    """Appends to the log while it is there, waits while it isn't."""

    def __init__(self, log: MemoryLog, queue_bytes: int = QUEUE_BYTES) -> None:
        self._log = log
        self._queue_bytes = queue_bytes
        self._waiting: deque[_Sent] = deque()
        self._landed: deque[_Sent] = deque()
        self._next_partition = 0
        self._stopped = False
        self._forget = log.on_stir(self._work)

    async def send(
        self, topic: str, value: bytes | None, *, key: bytes | None = None, partition: int | None = None
    ) -> asyncio.Future[int]:
        if self._stopped:
            raise Unavailable("the producer is stopped")
        known = self._log.topic(topic)
        size = check_record(topic, key, value, partition, known.partitions, known.max_message_bytes)
        if size + sum(sent.size for sent in self._waiting) > self._queue_bytes:
            raise Unavailable("the log is away and the queue is full")
        ack: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if partition is None:
            partition = self._choose(key, known.partitions)
        self._waiting.append(_Sent(Partition(topic, partition), key, value, size, ack))
        self._log.stir()
        return ack

    async def flush(self) -> None:
        while pending := [sent.ack for sent in (*self._waiting, *self._landed)]:
            await asyncio.wait(pending)
            await asyncio.sleep(0)

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._log.available and not self._log.holding_acks:
            await self.flush()
        self._fail()
        self._forget()

    def _choose(self, key: bytes | None, partitions: int) -> int:
        if key is not None:
            return partition_of(key, partitions)
        self._next_partition += 1
        return self._next_partition % partitions

    def _work(self) -> None:
        while self._waiting and self._log.available:
            sent = self._waiting.popleft()
            fault = self._log.next_fault(sent.at.topic)
            if fault != "vanishes":
                sent.offset = self._log.append(sent.at, sent.key, sent.value)
            self._landed.append(sent)
            if fault is not None:
                self._fail()
        if self._landed and not self._log.holding_acks:
            asyncio.get_running_loop().call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        while self._landed and not self._log.holding_acks:
            sent = self._landed.popleft()
            if not sent.ack.done() and sent.offset is not None:
                sent.ack.set_result(sent.offset)

    def _fail(self) -> None:
        """What isn't acknowledged yet has an unknown outcome, all of it: nothing may overtake a lost record."""
        for sent in (*self._landed, *self._waiting):
            if not sent.ack.done():
                sent.ack.set_exception(SendUnknown("the log never said whether it has the record"))
                sent.ack.exception()  # a caller that doesn't ask is none to warn
        self._landed.clear()
        self._waiting.clear()


class MemoryReader:
    """Reads what it is told to."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._cursor = Cursor(log)

    async def assign(self, starts: Mapping[Partition, Start]) -> None:
        self._log.check()
        self._cursor.restart({at: self._log.resolve(at, start) for at, start in starts.items()})

    async def poll(self, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        return await self._cursor.poll(timeout_ms, max_records)

    def position(self, partition: Partition) -> int:
        return self._cursor.positions[partition]

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return ends(self._log, partitions)

    async def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return beginnings(self._log, partitions)

    async def stop(self) -> None:
        self._cursor.restart({})


class MemoryMember:
    """A member of a group; takes its seat with its first poll (the assignee may need to know it by then)."""

    def __init__(
        self, log: MemoryLog, group: str, topics: Sequence[str], assignee: Assignee, instance_id: str | None
    ) -> None:
        self._log = log
        self._group = log.group(group)
        self._topics = topics
        self._assignee = assignee
        self._instance_id = instance_id
        self._cursor = Cursor(log)
        self._seat: Seat | None = None
        self._assigned: frozenset[Partition] = frozenset()

    async def _attend(self) -> None:
        """Be in the group, if that can be: join, or notice that the session has ended and join again."""
        if not self._log.available:
            return
        if self._seat is not None:
            if self._group.holds(self._seat):
                return
            await self.lose()
            if self._group.taken_over(self._seat):
                raise NotMember("another process has taken this member's place")
        self._seat = await self._group.join(self, self._topics, self._instance_id)

    async def lose(self) -> None:
        lost, self._assigned = self._assigned, frozenset()
        self._cursor.restart({})
        if lost:
            await self._assignee.revoked(lost)

    async def gain(self, partitions: frozenset[Partition]) -> None:
        self._assigned = partitions
        commits = self._group.commits
        self._cursor.restart(
            {at: commits[at].offset if at in commits else self._log.stored(at).start for at in sorted(partitions)}
        )
        await self._assignee.assigned(partitions)

    async def poll(self, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        await self._attend()
        return await self._cursor.poll(timeout_ms, max_records)

    def assignment(self) -> frozenset[Partition]:
        return self._assigned

    async def committed(self, partition: Partition) -> Commit | None:
        self._log.check()
        return self._group.commits.get(partition)

    async def commit(self, commits: Mapping[Partition, Commit]) -> None:
        self._log.check()
        if self._seat is None:
            raise NotMember("the member has not joined its group yet; nothing was committed")
        for commit in commits.values():
            if len(commit.metadata.encode()) > METADATA_BYTES:
                raise ValueError(f"a commit's metadata can't be over {METADATA_BYTES} bytes")
        self._group.commit(self._seat, commits)

    def pause(self, partitions: Iterable[Partition]) -> None:
        self._cursor.paused.update(self._assigned.intersection(partitions))

    def resume(self, partitions: Iterable[Partition]) -> None:
        self._cursor.paused.difference_update(partitions)
        self._log.stir()

    def seek(self, partition: Partition, offset: int) -> None:
        if partition not in self._assigned:
            raise ValueError(f"{partition} isn't assigned")
        self._cursor.positions[partition] = offset
        self._log.stir()

    async def stop(self, *, leave: bool = True) -> None:
        seat, self._seat = self._seat, None
        self._cursor.restart({})
        if seat is None:
            return
        self._group.vacate(seat)
        if leave and self._log.available:
            await self._group.leave(seat)


class MemoryAdmin:
    """Creates and describes topics."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def create(self, topics: Iterable[Topic]) -> tuple[str, ...]:
        self._log.check()
        new = []
        for topic in topics:
            old = self._log.topics.get(topic.name)
            if old is None:
                self._log.topics[topic.name] = topic
                new.append(topic.name)
            elif old.partitions < topic.partitions:
                self._log.topics[topic.name] = replace(old, partitions=topic.partitions)
                for group in self._log.groups.values():
                    await group.recount(topic.name)
        return tuple(new)

    async def partitions(self, topic: str) -> int | None:
        self._log.check()
        return self._log.partition_count(topic) or None

    async def topics(self) -> frozenset[str]:
        self._log.check()
        return frozenset(self._log.topics)

    async def group_commits(self, group: str) -> dict[Partition, Commit]:
        self._log.check()
        return dict(self._log.group(group).commits)

    async def stop(self) -> None:
        """Nothing to close."""


class MemoryBus:
    """One process's access to a shared `MemoryLog`."""

    def __init__(self, log: MemoryLog, *, queue_bytes: int = QUEUE_BYTES) -> None:
        self._log = log
        self._queue_bytes = queue_bytes

    async def producer(self, *, acks: Acks = "all", linger_ms: int = 0, client_id: str = "") -> MemoryProducer:
        return MemoryProducer(self._log, self._queue_bytes)

    async def reader(self, *, client_id: str = "") -> MemoryReader:
        return MemoryReader(self._log)

    async def member(
        self,
        group: str,
        topics: Sequence[str],
        assignee: Assignee,
        *,
        instance_id: str | None = None,
        session_timeout_ms: int = 10_000,
        client_id: str = "",
    ) -> MemoryMember:
        return MemoryMember(self._log, group, topics, assignee, instance_id)

    async def admin(self) -> MemoryAdmin:
        return MemoryAdmin(self._log)
