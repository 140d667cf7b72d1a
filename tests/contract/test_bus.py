"""What every bus answers, the one on Kafka and the one in memory alike."""

from __future__ import annotations

import asyncio

import pytest
from bus_world import Told, World, at, take, until, values

from wire.bus import AtOffset, AtTime, Partition
from wire.errors import NotMember, Unavailable, UnknownTopic
from wire.topics import LARGE_MESSAGE_BYTES, Topic

# ---------------------------------------------------------------- sending


async def test_sends_reach_a_partition_in_the_order_of_the_calls(world: World) -> None:
    topic = await world.topic("t")
    producer = await world.producer()
    acks = [await producer.send(topic, b"%d" % n, partition=0) for n in range(5_000)]
    await producer.flush()
    assert [await ack for ack in acks] == list(range(5_000))
    reader = await world.reader()
    await reader.assign({Partition(topic, 0): "earliest"})
    assert values(await take(reader, 5_000)) == [b"%d" % n for n in range(5_000)]


async def test_sends_from_many_tasks_keep_each_tasks_order(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer = await world.producer(linger_ms=2)

    async def run(task: int) -> None:
        for n in range(100):
            await producer.send(topic, b"%d.%d" % (task, n), partition=task % 2)

    await asyncio.gather(*(run(task) for task in range(6)))
    await producer.flush()
    reader = await world.reader()
    await reader.assign({Partition(topic, 0): "earliest", Partition(topic, 1): "earliest"})
    seen = [(value or b"").split(b".") for value in values(await take(reader, 600))]
    for task in range(6):
        assert [int(n) for of, n in seen if int(of) == task] == list(range(100))


async def test_one_writers_offsets_are_contiguous_and_a_second_writer_shows(world: World) -> None:
    topic = await world.topic("t")
    first, second = await world.producer(), await world.producer()
    offsets = [await (await first.send(topic, b"a")) for _ in range(3)]
    assert offsets == [0, 1, 2]
    assert await (await second.send(topic, b"b")) == 3
    assert await (await first.send(topic, b"a")) == 4


async def test_a_key_chooses_the_partition_as_kafkas_clients_do(world: World) -> None:
    topic = await world.topic("t", partitions=8)
    producer = await world.producer()
    # murmur2 of Kafka's Java client, from its UtilsTest: "21" → -973932308, "foobar" → -790332482
    for key, hashed in ((b"21", -973932308), (b"foobar", -790332482)):
        await (await producer.send(topic, b"v", key=key))
        reader = await world.reader()
        await reader.assign({Partition(topic, (hashed & 0x7FFFFFFF) % 8): "earliest"})
        assert key in [record.key for record in await take(reader, 1)]


async def test_without_key_or_partition_records_spread(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer = await world.producer(acks="leader")
    for _ in range(4):
        await producer.send(topic, b"v")
    await producer.flush()
    reader = await world.reader()
    assert min((await reader.end_offsets([Partition(topic, 0), Partition(topic, 1)])).values()) == 2


async def test_a_record_of_almost_16_mb_passes_whole(world: World) -> None:
    topic = await world.topic("t", max_message_bytes=LARGE_MESSAGE_BYTES)
    producer = await world.producer()
    value = bytes(range(256)) * (LARGE_MESSAGE_BYTES // 256 - 1)
    acks = [await producer.send(topic, value, key=b"k"), await producer.send(topic, b"next")]
    assert [await ack for ack in acks] == [0, 1]
    reader = await world.reader()
    await reader.assign({Partition(topic, 0): "earliest"})
    assert values(await take(reader, 2)) == [value, b"next"]


async def test_a_record_over_the_limit_is_a_value_error_and_harms_nothing(world: World) -> None:
    topic = await world.topic("t", max_message_bytes=1024 * 1024)
    producer = await world.producer()
    with pytest.raises(ValueError, match="over the limit"):
        await producer.send(topic, bytes(1024 * 1024))
    assert await (await producer.send(topic, bytes(1024 * 1024 - 200))) == 0


async def test_what_can_not_be_a_record_is_refused(world: World) -> None:
    topic = await world.topic("t")
    producer = await world.producer()
    with pytest.raises(ValueError, match="needs a key or a value"):
        await producer.send(topic, None)
    with pytest.raises(ValueError, match="has partitions 0 to 0"):
        await producer.send(topic, b"v", partition=1)
    with pytest.raises(UnknownTopic):
        await producer.send(world.name("nobody-made-it"), b"v")


async def test_a_stopped_producer_has_sent_everything_and_sends_no_more(world: World) -> None:
    topic = await world.topic("t")
    producer = await world.producer(linger_ms=50)
    acks = [await producer.send(topic, b"v") for _ in range(10)]
    await producer.stop()
    assert [await ack for ack in acks] == list(range(10))
    with pytest.raises(Unavailable):
        await producer.send(topic, b"v")


async def test_a_caller_that_gives_up_waiting_changes_nothing(world: World) -> None:
    topic = await world.topic("t")
    producer = await world.producer(linger_ms=30)
    acks = [await producer.send(topic, b"%d" % n) for n in range(4)]
    for ack in acks[1::2]:
        ack.cancel()
    await producer.flush()
    assert [ack.result() for ack in acks[::2]] == [0, 2]
    reader = await world.reader()
    assert await reader.end_offsets([Partition(topic, 0)]) == {Partition(topic, 0): 4}


# ---------------------------------------------------------------- reading


async def test_latest_sees_what_is_sent_after_assign_and_nothing_before(world: World) -> None:
    topic = await world.topic("t")
    producer, reader = await world.producer(), await world.reader()
    await (await producer.send(topic, b"before"))
    await reader.assign({Partition(topic, 0): "latest"})
    assert reader.position(Partition(topic, 0)) == 1
    await producer.send(topic, b"after")
    assert values(await take(reader, 1)) == [b"after"]
    assert reader.position(Partition(topic, 0)) == 2


async def test_an_offset_outside_the_log_means_its_nearest_end(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer, reader = await world.producer(), await world.reader()
    for n in range(3):
        await (await producer.send(topic, b"%d" % n, partition=0))
    here, empty = Partition(topic, 0), Partition(topic, 1)
    for offset, position in ((1, 1), (99, 3), (-5, 0)):
        await reader.assign({here: AtOffset(offset), empty: AtOffset(offset)})
        assert (reader.position(here), reader.position(empty)) == (position, 0)
    assert values(await take(reader, 3)) == [b"0", b"1", b"2"]


async def test_a_time_means_the_first_record_not_older(world: World) -> None:
    topic = await world.topic("t")
    producer, reader = await world.producer(), await world.reader()
    start_ms = world.clock.now_ms()
    for n in range(3):
        await (await producer.send(topic, b"%d" % n))
        world.clock.advance(1_000)
    here = Partition(topic, 0)
    for after_ms, position in ((0, 0), (1, 1), (1_000, 1), (1_500, 2), (2_001, 3), (-9_000, 0)):
        await reader.assign({here: AtTime(start_ms + after_ms)})
        assert reader.position(here) == position, after_ms
    await reader.assign({here: AtTime(start_ms + 1_000)})
    records = await take(reader, 2)
    assert [(r.offset, r.timestamp_ms - start_ms) for r in records] == [(1, 1_000), (2, 2_000)]


async def test_assign_replaces_what_was_assigned(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer, reader = await world.producer(), await world.reader()
    await (await producer.send(topic, b"zero", partition=0))
    await (await producer.send(topic, b"one", partition=1))
    await reader.assign({Partition(topic, 0): "earliest"})
    assert values(await take(reader, 1)) == [b"zero"]
    await reader.assign({Partition(topic, 1): "earliest"})
    assert values(await take(reader, 1)) == [b"one"]
    assert await reader.poll(150) == []


async def test_poll_gives_no_more_than_asked_and_starves_no_partition(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer, reader = await world.producer(), await world.reader()
    for n in range(30):
        await producer.send(topic, b"%d" % n, partition=0)
    await producer.send(topic, b"rare", partition=1)
    await producer.flush()
    await reader.assign({Partition(topic, 0): "earliest", Partition(topic, 1): "earliest"})
    seen: list[bytes | None] = []
    while b"rare" not in seen:
        records = await reader.poll(1_000, max_records=5)
        assert len(records) <= 5
        seen += values(records)
    assert len(seen) < 31, "the rare record came before the busy partition was through"


async def test_ends_and_beginnings_are_asked_of_the_log(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer, reader = await world.producer(), await world.reader()
    here, empty = Partition(topic, 0), Partition(topic, 1)
    await (await producer.send(topic, b"v", partition=0))
    assert await reader.end_offsets([here, empty]) == {here: 1, empty: 0}
    assert await reader.beginning_offsets([here, empty]) == {here: 0, empty: 0}
    with pytest.raises(UnknownTopic):
        await reader.end_offsets([Partition(topic, 2)])
    with pytest.raises(UnknownTopic):
        await reader.assign({Partition(world.name("nobody-made-it"), 0): "earliest"})


async def test_tombstones_and_keys_pass(world: World) -> None:
    topic = await world.topic("t", retention_ms=None)
    producer, reader = await world.producer(), await world.reader()
    await producer.send(topic, b"v", key=b"k")
    await producer.send(topic, None, key=b"k")
    await producer.send(topic, b"", key=b"")
    await reader.assign({Partition(topic, 0): "earliest"})
    assert [(r.key, r.value) for r in await take(reader, 3)] == [(b"k", b"v"), (b"k", None), (b"", b"")]


# ---------------------------------------------------------------- groups


async def test_a_member_gets_everything_from_the_start_and_then_from_its_commit(world: World) -> None:
    topic = await world.topic("t")
    producer = await world.producer()
    for n in range(4):
        await (await producer.send(topic, b"%d" % n))
    here, told = Partition(topic, 0), Told()
    member = await world.member("g", [topic], told)
    assert values(await take(member, 4)) == [b"0", b"1", b"2", b"3"]
    assert told.events == [("assigned", frozenset({here}))]
    assert member.assignment() == {here}
    assert await member.committed(here) is None
    await member.commit({here: at(2, "needs 17")})
    await member.commit({})
    assert await member.committed(here) == at(2, "needs 17")
    await member.stop()
    second = await world.member("g", [topic])
    assert values(await take(second, 2)) == [b"2", b"3"]
    admin = await world.bus().admin()
    assert await admin.group_commits(world.name("g")) == {here: at(2, "needs 17")}
    await admin.stop()


async def test_two_members_split_co_partitioned_topics_alike_and_share_again_when_one_leaves(world: World) -> None:
    topics = [await world.topic("requests", partitions=4), await world.topic("batch", partitions=4)]
    whole = frozenset(Partition(topic, n) for topic in topics for n in range(4))
    told_a, told_b = Told(), Told()
    a = await world.member("g", topics, told_a)
    await until(lambda: a.assignment() == whole, a)
    b = await world.member("g", topics, told_b)
    await until(lambda: len(a.assignment()) == len(b.assignment()) == 4, a, b)
    for member in (a, b):
        numbers = [{p.partition for p in member.assignment() if p.topic == topic} for topic in topics]
        assert numbers[0] == numbers[1]
        assert len(numbers[0]) == 2
    assert a.assignment() | b.assignment() == whole
    # eager: everything is revoked first, then each is told the whole set it has
    assert told_a.events[:2] == [("assigned", whole), ("revoked", whole)]
    assert told_a.events[-1] == ("assigned", a.assignment())
    kept = a.assignment()
    await b.stop()
    await until(lambda: a.assignment() == whole, a)
    assert told_a.events[-2:] == [("revoked", kept), ("assigned", whole)]


async def test_few_partitions_move_when_a_third_member_comes(world: World) -> None:
    topic = await world.topic("t", partitions=6)
    members = [await world.member("g", [topic])]
    for size in (2, 3):
        before = [member.assignment() for member in members]
        members.append(await world.member("g", [topic]))
        share = 6 // size
        await until(lambda share=share: all(len(m.assignment()) == share for m in members), *members)
        for old, member in zip(before, members, strict=False):
            assert member.assignment() <= old or not old


async def test_a_static_member_that_restarts_gets_its_partitions_back_and_disturbs_nobody(world: World) -> None:
    topic = await world.topic("t", partitions=4)
    told_a = Told()
    a = await world.member("g", [topic], told_a, instance_id="engine-a")
    b = await world.member("g", [topic], instance_id="engine-b")
    await until(lambda: len(a.assignment()) == len(b.assignment()) == 2, a, b)
    had, seen = b.assignment(), len(told_a.events)
    await b.stop(leave=False)
    again = await world.member("g", [topic], instance_id="engine-b")
    await until(lambda: len(again.assignment()) > 0, a, again)
    assert again.assignment() == had
    assert len(told_a.events) == seen


async def test_a_zombie_whose_place_was_taken_commits_nothing_and_is_told(world: World) -> None:
    topic = await world.topic("t")
    here = Partition(topic, 0)
    zombie = await world.member("g", [topic], instance_id="engine-a")
    await until(lambda: zombie.assignment() == {here}, zombie)
    await zombie.commit({here: at(0, "mine")})
    heir = await world.member("g", [topic], instance_id="engine-a")
    await until(lambda: heir.assignment() == {here}, heir)
    for commits in ({here: at(0, "still mine?")}, {}):
        with pytest.raises(NotMember):
            await zombie.commit(commits)
    assert await heir.committed(here) == at(0, "mine")
    with pytest.raises(NotMember, match="another process"):
        await until(lambda: False, zombie)
    await heir.commit({here: at(0, "heir")})


async def test_nobody_commits_what_is_not_assigned_or_too_long(world: World) -> None:
    topic = await world.topic("t", partitions=1)
    member = await world.member("g", [topic])
    await until(lambda: len(member.assignment()) == 1, member)
    with pytest.raises(NotMember):
        await member.commit({Partition(topic, 1): at(0)})
    with pytest.raises(ValueError, match="4096 bytes"):
        await member.commit({Partition(topic, 0): at(0, "x" * 4097)})
    await member.commit({Partition(topic, 0): at(0, "x" * 4096)})


async def test_what_is_paused_is_not_returned_until_it_is_resumed(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer = await world.producer()
    member = await world.member("g", [topic])
    await until(lambda: len(member.assignment()) == 2, member)
    paused, flowing = Partition(topic, 0), Partition(topic, 1)
    member.pause([paused])
    await (await producer.send(topic, b"held", partition=0))
    await (await producer.send(topic, b"let through", partition=1))
    assert values(await take(member, 1)) == [b"let through"]
    assert await member.poll(200) == []
    member.resume([paused])
    assert values(await take(member, 1)) == [b"held"]
    member.seek(flowing, 0)
    assert values(await take(member, 1)) == [b"let through"]


async def test_a_member_may_seek_and_pause_while_it_is_told_of_its_assignment(world: World) -> None:
    topic = await world.topic("t", partitions=2)
    producer, told = await world.producer(), Told()
    for n in range(3):
        await (await producer.send(topic, b"%d" % n, partition=0))
        await (await producer.send(topic, b"paused", partition=1))

    async def place(partitions: frozenset[Partition]) -> None:
        member.seek(Partition(topic, 0), 2)
        member.pause([Partition(topic, 1)])

    told.on_assigned = place
    member = await world.member("g", [topic], told)
    assert values(await take(member, 1)) == [b"2"]
    assert await member.poll(200) == []


async def test_seek_needs_an_assigned_partition(world: World) -> None:
    topic = await world.topic("t")
    member = await world.member("g", [topic])
    await until(lambda: len(member.assignment()) == 1, member)
    with pytest.raises(ValueError, match="isn't assigned"):
        member.seek(Partition(topic, 7), 0)


# ---------------------------------------------------------------- topics


async def test_topics_are_created_once_and_only_grow(world: World) -> None:
    admin = await world.bus().admin()
    small = Topic(name=world.name("t"), partitions=2, retention_ms=60_000)
    compacted = Topic(name=world.name("c"), partitions=1, retention_ms=None, compact_horizon_ms=60_000)
    assert set(await admin.create([small, compacted])) == {small.name, compacted.name}
    assert await admin.create([small, compacted]) == ()
    grown = Topic(name=small.name, partitions=5, retention_ms=60_000)
    assert await admin.create([grown]) == ()
    assert await admin.create([small]) == ()
    assert await admin.partitions(small.name) == 5
    assert await admin.partitions(world.name("nobody-made-it")) is None
    assert {small.name, compacted.name} <= await admin.topics()
    assert not any(name.startswith("__") for name in await admin.topics())
    assert await admin.group_commits(world.name("nobody")) == {}
    await admin.stop()
