"""Control's shell over the in-memory log: what it publishes, when it is silent, and what it can't read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from routing_world import MODEL, signal

from aggregator.control import Listener, tick
from aggregator.publish import Publisher
from aggregator.windows import Windows
from wire.bus import Partition, Record
from wire.clock import ManualClock
from wire.codec import decode, encode
from wire.follow import dead_letters
from wire.memory import MemoryBus, MemoryProducer
from wire.memory_log import MemoryLog
from wire.messages import Dead, Message, Sketch, Snapshot
from wire.settings import Settings
from wire.topics import DEAD, WEIGHTS, shared_topics, weights_key


class World:
    """A log, its clock, and the parts of control on it."""

    def __init__(self, log: MemoryLog, clock: ManualClock, producer: MemoryProducer) -> None:
        self.log, self.clock = log, clock
        self.windows = Windows()
        self.publisher = Publisher(producer)
        self.listener = Listener(self.windows, dead_letters(producer, "control", clock), clock)
        self.offset = 0

    async def hear(self, value: bytes) -> None:
        await self.listener.hear(
            Record(topic="signals", partition=0, offset=self.offset, key=None, value=value, timestamp_ms=0)
        )
        self.offset += 1

    async def listen(self) -> None:
        """Hear an engine for as long as it takes to speak."""
        for _ in range(4):
            self.clock.advance(500)
            await self.hear(encode(signal(at_ms=self.clock.now_ms())))

    async def until_published(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.read(WEIGHTS)) < count:
                await self.log.changed(1.0)

    def round(self) -> list[Snapshot]:
        return self.windows.snapshots(["local"], self.clock.now_ms())

    def read(self, topic: str) -> list[tuple[bytes | None, Message]]:
        return [(r.key, decode(r.value)) for r in self.log.read(Partition(topic, 0), 0, 1000)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock = ManualClock()
    log = MemoryLog(clock)
    bus = MemoryBus(log)
    await (await bus.admin()).create(shared_topics())
    producer = await bus.producer()
    yield World(log, clock, producer)
    await producer.stop()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_round_goes_to_its_keys(world: World) -> None:
    await world.listen()
    assert await world.publisher.publish(world.round())
    ((key, made),) = world.read(WEIGHTS)
    assert key == weights_key(MODEL, "local")
    assert isinstance(made, Snapshot)
    assert [route.weight for route in made.routes] == [1.0]


async def test_while_the_log_is_away_one_round_waits_and_no_more(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.listen()
    world.log.away()
    assert [await world.publisher.publish(world.round()) for _ in range(5)] == [True, False, False, False, False]
    world.log.back()
    await settle()
    assert len(world.read(WEIGHTS)) == 1
    assert await world.publisher.publish(world.round())


async def test_a_lost_acknowledgement_is_said_once_and_publishing_goes_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.listen()
    caplog.set_level("INFO")
    world.log.lose_ack(WEIGHTS, times=2)
    for _ in range(3):
        assert await world.publisher.publish(world.round())
        await settle()
    said = [record.message for record in caplog.records if record.name == "millstream.control"]
    assert [text.split(",")[0] for text in said] == ["weights don't reach the log", "weights reach the log again"]


async def test_weights_without_their_topic_are_no_reason_to_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    producer = await MemoryBus(MemoryLog(clock)).producer()
    world = World(MemoryLog(clock), clock, producer)
    await world.listen()
    assert not await world.publisher.publish(world.round())
    assert "don't reach the log" in caplog.text
    await producer.stop()


async def test_what_cannot_be_read_goes_to_dead_without_its_content(world: World) -> None:
    await world.hear(b"\xff not json")
    await world.hear(encode(Dead(topic="t", partition=0, offset=0, why="secret", reader="r", at_ms=0)))
    await world.hear(encode(signal(ttft=Sketch(counts={"secret": 1}, total=1))))
    await settle()
    dead = [message for _, message in world.read(DEAD)]
    assert [(d.topic, d.offset, d.reader) for d in dead if isinstance(d, Dead)] == [
        ("signals", 0, "control"),
        ("signals", 1, "control"),
        ("signals", 2, "control"),
    ]
    assert not any(b"secret" in encode(d) for d in dead)
    assert world.round() == []


async def test_each_interval_brings_a_round_but_only_while_control_listens(world: World) -> None:
    settings = Settings(snapshot_interval_ms=1)
    ticking = asyncio.create_task(tick(settings, world.windows, world.publisher, world.clock))
    await asyncio.sleep(0.02)
    assert world.read(WEIGHTS) == []
    await world.listen()
    await world.until_published(3)
    world.clock.advance(60_000)
    await asyncio.sleep(0.01)
    silent = len(world.read(WEIGHTS))
    await asyncio.sleep(0.02)
    assert len(world.read(WEIGHTS)) == silent
    ticking.cancel()
    await asyncio.wait({ticking})
