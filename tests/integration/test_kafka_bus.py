"""What only the real broker can show of the bus: frozen members, lost sequences, deleted records."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import TopicPartition
from kafka_broker import RunningBroker

from wire.bus import Member, Partition
from wire.errors import SendUnknown
from wire.kafka import KafkaBus
from wire.topics import Topic

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]
"""generous: on a busy machine a broker takes most of a minute to start"""
ROOT = Path(__file__).parents[2]


class Quiet:
    """An assignee with nothing to say."""

    async def assigned(self, partitions: frozenset[Partition]) -> None: ...

    async def revoked(self, partitions: frozenset[Partition]) -> None: ...


@pytest.fixture
async def opened() -> AsyncIterator[AsyncExitStack]:
    """What is entered here is closed when the test ends, however it ends."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def topic(kafka_bus: KafkaBus, suffix: str) -> str:
    admin = await kafka_bus.admin()
    await admin.create([Topic(name=f"t.{suffix}", partitions=2, retention_ms=3_600_000)])
    await admin.stop()
    return f"t.{suffix}"


async def test_a_member_frozen_past_its_session_finds_out_and_works_again(
    broker: RunningBroker, kafka_bus: KafkaBus, topic: str, opened: AsyncExitStack
) -> None:
    frozen = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("member_process.py"))),
        *(broker.cluster.bootstrap, f"g.{topic}", topic, "frozen"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert frozen.stdout is not None
    assert frozen.stdin is not None
    out, tell = frozen.stdout, frozen.stdin

    async def hear(*wanted: str) -> None:
        """Read on until these words were said, in this order."""
        async with asyncio.timeout(40):
            for word in wanted:
                while not (line := (await out.readline()).decode()).startswith(word):
                    assert line, "the process ended"

    try:
        await hear("assigned 0 1")
        tell.write(b"commit\n")
        await hear("committed")
        other = await kafka_bus.member(f"g.{topic}", [topic], Quiet(), instance_id="other", session_timeout_ms=6_000)
        opened.push_async_callback(other.stop)
        await hear("revoked 0 1", "assigned")
        frozen.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(40):
            while len(other.assignment()) < 2:
                await other.poll(50)
        tell.write(b"commit\n")
        frozen.send_signal(signal.SIGCONT)
        await hear("refused NotMember", "assigned")
        tell.write(b"commit\n")
        await hear("committed")
        producer = await kafka_bus.producer()
        opened.push_async_callback(producer.stop)
        for number in range(2):
            await producer.send(topic, b"for both", partition=number)
        await producer.flush()
        await hear("read for both")
    finally:
        frozen.kill()
        await frozen.wait()


async def test_partitions_that_are_added_are_shared_out_even_after_the_leader_restarted(
    kafka_bus: KafkaBus, topic: str, opened: AsyncExitStack
) -> None:
    async def join() -> Member:
        member = await kafka_bus.member(f"g.{topic}", [topic], Quiet(), instance_id="only", session_timeout_ms=6_000)
        opened.push_async_callback(member.stop)
        return member

    async def has(member: Member, partitions: int) -> None:
        async with asyncio.timeout(40):
            while len(member.assignment()) != partitions:
                await member.poll(50)

    first = await join()
    await has(first, 2)
    await first.stop(leave=False)
    again = await join()
    await has(again, 2)
    admin = await kafka_bus.admin()
    opened.push_async_callback(admin.stop)
    await admin.create([Topic(name=topic, partitions=3, retention_ms=3_600_000)])
    await has(again, 3)


async def test_a_lost_sequence_makes_everything_behind_it_unknown_and_a_new_producer_id(
    kafka_bus: KafkaBus, topic: str, opened: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    producer = await kafka_bus.producer()
    opened.push_async_callback(producer.stop)
    await (await producer.send(topic, b"before", partition=0))
    delivery = producer._delivery
    assert delivery is not None
    # as if the broker had lost the producer's last records: the next sequence number can't follow
    delivery._lanes[Partition(topic, 0)].sequence += 7
    behind = [await producer.send(topic, b"behind", partition=n % 2) for n in range(6)]
    outcomes = await asyncio.gather(*behind, return_exceptions=True)
    assert [isinstance(outcome, SendUnknown) for outcome in outcomes if not isinstance(outcome, int)]
    assert all(isinstance(outcome, SendUnknown) for outcome in outcomes[::2]), "all of the partition that broke"
    assert "OutOfOrderSequenceNumber" in caplog.text
    after = [await (await producer.send(topic, b"after", partition=0)) for _ in range(3)]
    assert after == [1, 2, 3], "nothing of what failed is in the log before or between"


async def test_reading_where_records_were_deleted_goes_on_at_the_logs_start(
    broker: RunningBroker, kafka_bus: KafkaBus, topic: str, opened: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    producer = await kafka_bus.producer()
    opened.push_async_callback(producer.stop)
    for n in range(6):
        await (await producer.send(topic, b"%d" % n, partition=0))
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.cluster.bootstrap)
    await admin.start()
    await admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(4)})
    await admin.close()
    member = await kafka_bus.member(f"g.{topic}", [topic], Quiet(), session_timeout_ms=6_000)
    opened.push_async_callback(member.stop)
    async with asyncio.timeout(20):
        while not member.assignment():
            await member.poll(50)
        member.seek(Partition(topic, 0), 1)
        seen: list[bytes | None] = []
        while len(seen) < 2:
            seen += [record.value for record in await member.poll(50)]
    assert seen == [b"4", b"5"]
    assert "offset 1 isn't in the log; reading on from its start, 4" in caplog.text


async def test_an_existing_topic_keeps_longer_and_all_else_as_it_was(
    broker: RunningBroker, kafka_bus: KafkaBus, suffix: str
) -> None:
    sent, published = f"sent.{suffix}", f"published.{suffix}"
    admin = await kafka_bus.admin()
    earlier = [
        Topic(name=sent, partitions=1, retention_ms=300_000, retention_bytes=12_345),
        Topic(name=published, partitions=1, retention_ms=None),
    ]
    await admin.create(earlier)
    later = [
        Topic(name=sent, partitions=1, retention_ms=3_600_000),
        Topic(name=published, partitions=1, retention_ms=None, compact_after_ms=3_600_000),
    ]
    assert await admin.create(later) == ()
    await admin.create(earlier)
    await admin.stop()
    client = AIOKafkaAdminClient(bootstrap_servers=broker.cluster.bootstrap)
    await client.start()
    try:
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in (sent, published)]
        (response,) = await client.describe_configs(resources)
    finally:
        await client.close()
    found = {name: {key: value for key, value, *_ in entries} for *_, name, entries in response.resources}
    assert (found[sent]["retention.ms"], found[sent]["retention.bytes"]) == ("3600000", "12345")
    assert (found[published]["min.compaction.lag.ms"], found[published]["cleanup.policy"]) == ("3600000", "compact")
