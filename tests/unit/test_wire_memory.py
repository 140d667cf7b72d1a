"""What the in-memory bus can do beyond the contract: outages and faults on order."""

from __future__ import annotations

import asyncio
import logging

import pytest

from wire.bus import Commit, Partition, Record
from wire.clock import ManualClock
from wire.codec import decode
from wire.errors import NotMember, SendUnknown, Unavailable, UnknownTopic
from wire.follow import Follower, Tail, dead_letters
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import Dead, Placement
from wire.topics import DEAD, Topic

HERE = Partition("t", 0)


@pytest.fixture
async def log() -> MemoryLog:
    log = MemoryLog(ManualClock())
    admin = await MemoryBus(log).admin()
    await admin.create([Topic(name=name, partitions=2, retention_ms=60_000) for name in ("t", DEAD)])
    return log


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []

    async def assigned(self, partitions: frozenset[Partition]) -> None:
        self.events.append(("assigned", sorted(at.partition for at in partitions)))

    async def revoked(self, partitions: frozenset[Partition]) -> None:
        self.events.append(("revoked", sorted(at.partition for at in partitions)))


def stored(log: MemoryLog) -> list[bytes | None]:
    return [record.value for record in log.stored(HERE).records]


async def test_while_the_log_is_away_records_wait_and_questions_are_unavailable(log: MemoryLog) -> None:
    bus = MemoryBus(log)
    producer, reader, admin = await bus.producer(), await bus.reader(), await bus.admin()
    await reader.assign({HERE: "latest"})
    member = await bus.member("g", ["t"], Told())
    await member.poll(0)
    log.away()
    acks = [await producer.send("t", b"%d" % n, partition=0) for n in range(3)]
    assert await reader.poll(10) == []
    assert await member.poll(10) == []
    assert not any(ack.done() for ack in acks)
    for question in (
        reader.assign({HERE: "latest"}),
        reader.end_offsets([HERE]),
        reader.beginning_offsets([HERE]),
        member.committed(HERE),
        member.commit({HERE: Commit(offset=0)}),
        admin.create([]),
        admin.partitions("t"),
        admin.topics(),
        admin.group_commits("g"),
    ):
        with pytest.raises(Unavailable):
            await question
    log.back()
    assert [await ack for ack in acks] == [0, 1, 2]
    assert [record.value for record in await reader.poll(10)] == [b"0", b"1", b"2"]
    await member.stop()


async def test_the_queue_of_a_log_that_is_away_is_bounded(log: MemoryLog) -> None:
    producer = await MemoryBus(log, queue_bytes=1_000).producer()
    log.away()
    await producer.send("t", bytes(500))
    with pytest.raises(Unavailable, match="queue is full"):
        await producer.send("t", bytes(500))
    log.back()
    await producer.send("t", bytes(500))


async def test_a_lost_acknowledgement_may_have_landed_or_not(log: MemoryLog) -> None:
    producer = await MemoryBus(log).producer()
    log.lose_ack("t")
    with pytest.raises(SendUnknown):
        await (await producer.send("t", b"landed", partition=0))
    log.lose_ack("t", lands=False)
    with pytest.raises(SendUnknown):
        await (await producer.send("t", b"vanished", partition=0))
    assert await (await producer.send("t", b"next", partition=0)) == 1
    assert stored(log) == [b"landed", b"next"]


async def test_what_waits_behind_a_lost_record_is_lost_too(log: MemoryLog) -> None:
    producer = await MemoryBus(log).producer()
    log.away()
    acks = [await producer.send("t", b"%d" % n, partition=0) for n in range(4)]
    acks[0].cancel()
    await (await MemoryBus(log).producer()).stop()
    log.lose_ack("t", lands=False, times=2)
    log.back()
    outcomes = await asyncio.gather(*acks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, SendUnknown, SendUnknown, SendUnknown]
    assert stored(log) == []


async def test_held_acknowledgements_come_when_released(log: MemoryLog) -> None:
    bus = MemoryBus(log)
    producer = await bus.producer()
    log.hold_acks()
    held = [await producer.send("t", b"v", partition=0) for _ in range(2)]
    held[1].cancel()
    await asyncio.sleep(0)
    assert stored(log) == [b"v", b"v"], "the records are there"
    assert not held[0].done()
    log.release_acks()
    assert await held[0] == 0


async def test_stopping_does_not_wait_for_what_can_not_come(log: MemoryLog) -> None:
    producer = await MemoryBus(log).producer()
    log.hold_acks()
    ack = await producer.send("t", b"v")
    await producer.stop()
    await producer.stop()
    with pytest.raises(SendUnknown):
        await ack
    log.release_acks()


async def test_records_that_retention_deleted_are_skipped(log: MemoryLog) -> None:
    bus = MemoryBus(log)
    producer, reader = await bus.producer(), await bus.reader()
    for n in range(5):
        await producer.send("t", b"%d" % n, partition=0)
    await reader.assign({HERE: "earliest"})
    log.delete_before(HERE, 3)
    assert [record.value for record in await reader.poll(0)] == [b"3", b"4"]
    assert await reader.beginning_offsets([HERE]) == {HERE: 3}
    log.delete_before(HERE, 99)
    assert await reader.end_offsets([HERE]) == await reader.beginning_offsets([HERE]) == {HERE: 5}
    await reader.stop()


async def test_a_member_whose_session_expired_commits_nothing_and_joins_again(log: MemoryLog) -> None:
    bus, told, other_told = MemoryBus(log), Told(), Told()
    frozen = await bus.member("g", ["t"], told, instance_id="a")
    other = await bus.member("g", ["t"], other_told, instance_id="b")
    await frozen.poll(0)
    await other.poll(0)
    assert told.events == [("assigned", [0, 1]), ("revoked", [0, 1]), ("assigned", [0])]
    await log.expire("g", "a")
    await log.expire("g", "nobody")
    assert other_told.events[-1] == ("assigned", [0, 1])
    assert frozen.assignment() == {HERE}, "it doesn't know yet"
    with pytest.raises(NotMember):
        await frozen.commit({HERE: Commit(offset=1)})
    await frozen.poll(0)
    assert told.events[3:] == [("revoked", [0]), ("assigned", [1])] or told.events[3:] == [
        ("revoked", [0]),
        ("assigned", [0]),
    ]
    await frozen.commit({})
    assert log.group("g").generation == 4


async def test_a_member_that_never_joined_can_neither_commit_nor_leave(log: MemoryLog) -> None:
    member = await MemoryBus(log).member("g", ["t"], Told())
    with pytest.raises(NotMember, match="not joined"):
        await member.commit({})
    await member.stop()
    log.away()
    late = await MemoryBus(log).member("g", ["t"], Told())
    assert await late.poll(0) == []
    log.back()
    await late.poll(0)
    assert len(late.assignment()) == 2
    log.away()
    await late.stop()
    log.back()


async def test_a_static_member_that_comes_back_with_other_topics_makes_the_group_share_again(log: MemoryLog) -> None:
    bus = MemoryBus(log)
    await (await bus.admin()).create([Topic(name="u", partitions=1, retention_ms=60_000)])
    member = await bus.member("g", ["t"], Told(), instance_id="a")
    await member.poll(0)
    await member.stop(leave=False)
    again = await bus.member("g", ["t", "u", "not made yet"], Told(), instance_id="a")
    await again.poll(0)
    assert again.assignment() == {HERE, Partition("t", 1), Partition("u", 0)}


async def test_more_partitions_are_shared_out_at_once(log: MemoryLog) -> None:
    bus = MemoryBus(log)
    told, aside = Told(), Told()
    member = await bus.member("g", ["t"], told, instance_id="a")
    elsewhere = await bus.member("h", [DEAD], aside)
    gone = await bus.member("g", ["t"], Told(), instance_id="b")
    for one in (member, elsewhere, gone):
        await one.poll(0)
    await gone.stop(leave=False)
    await (await bus.admin()).create([Topic(name="t", partitions=6, retention_ms=60_000)])
    assert len(member.assignment()) == 3, "the other half waits for the member that is away"
    assert aside.events == [("assigned", [0, 1])]


async def test_leaving_a_place_that_is_gone_changes_nothing(log: MemoryLog) -> None:
    member = await MemoryBus(log).member("g", ["t"], Told(), instance_id="a")
    await member.poll(0)
    await log.expire("g", "a")
    await member.stop()
    assert log.group("g").generation == 2


async def test_there_is_no_partition_that_was_not_created(log: MemoryLog) -> None:
    with pytest.raises(UnknownTopic):
        log.stored(Partition("t", 2))
    await (await MemoryBus(log).admin()).stop()


async def test_a_follower_outlives_an_outage_and_its_age_grows_meanwhile(log: MemoryLog) -> None:
    clock, bus = ManualClock(), MemoryBus(log)

    async def dead(record: Record, why: str) -> None: ...

    log.away()
    follower: Follower[Placement] = Follower(bus, "t", Placement, clock=clock, dead=dead)
    await follower.start()
    await asyncio.sleep(0.05)
    log.back()
    await asyncio.wait_for(follower.wait_caught_up(), 10)
    log.away()
    clock.advance(3_000)
    await asyncio.sleep(0.5)
    assert follower.age_ms == 3_000
    log.back()
    async with asyncio.timeout(10):
        while follower.age_ms:  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.01)
    await follower.stop()


async def test_dead_letters_say_where_and_why_and_nothing_of_the_content(
    log: MemoryLog, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="wire.follow")
    bus = MemoryBus(log)
    producer = await bus.producer()
    tail: Tail[Placement] = Tail(
        bus,
        "t",
        Placement,
        lambda message, record: None,
        dead=dead_letters(producer, "tester", log.clock),
        start="earliest",
    )
    await producer.send("t", b"a secret", key=b"another secret", partition=0)
    reader = await bus.reader()
    await reader.assign({Partition(DEAD, n): "earliest" for n in range(2)})
    await tail.start()
    (note,) = await reader.poll(10_000)
    assert decode(note.value, Dead) == Dead(
        topic="t", partition=0, offset=0, why="the value isn't JSON", reader="tester", at_ms=log.clock.now_ms()
    )
    assert b"secret" not in (note.value or b"")
    await producer.stop()
    await (await bus.producer()).send("t", b"a secret too", partition=0)
    async with asyncio.timeout(10):
        while "could not be noted" not in caplog.text:  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.01)
    assert "secret" not in caplog.text
    await tail.stop()
