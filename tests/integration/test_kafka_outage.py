"""The broker dies, freezes and returns; processes freeze. What the bus promises must hold through all of it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from kafka_broker import RunningBroker

from wire.bus import Commit, Partition, Producer
from wire.clock import SystemClock
from wire.errors import SendUnknown, Unavailable
from wire.kafka import KafkaBus
from wire.topics import Topic

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]
"""generous: on a busy machine a broker takes most of a minute to start"""
BACK_WITHIN_S = 15.0


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker of these tests' own: they may kill it, if they bring it back."""
    running = RunningBroker(tmp_path_factory.mktemp("mortal"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def opened() -> AsyncIterator[AsyncExitStack]:
    """What is entered here is closed when the test ends, however it ends."""
    async with AsyncExitStack() as stack:
        yield stack


@dataclass
class Writer:
    """Sends numbered records to one partition, and writes down what became of each."""

    producer: Producer
    at: Partition
    name: str
    acked: dict[int, int] = field(default_factory=dict)
    """number → offset"""
    unknown: set[int] = field(default_factory=set)
    acks: list[asyncio.Future[int]] = field(default_factory=list)
    sent: int = 0
    going: bool = True

    async def run(self) -> None:
        while self.going:
            number = self.sent
            try:
                value = f"{self.name} {number}".encode()
                ack = await self.producer.send(self.at.topic, value, partition=self.at.partition)
            except Unavailable:
                await asyncio.sleep(0.05)
                continue
            self.sent += 1
            self.acks.append(ack)
            ack.add_done_callback(lambda done, number=number: self._done(number, done))
            await asyncio.sleep(0.002)

    def _done(self, number: int, ack: asyncio.Future[int]) -> None:
        if isinstance(ack.exception(), SendUnknown):
            self.unknown.add(number)
        else:
            self.acked[number] = ack.result()


class Follow:
    """A member that gets the whole topic, and keeps what it reads."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def assigned(self, partitions: frozenset[Partition]) -> None:
        self.events.append("assigned")

    async def revoked(self, partitions: frozenset[Partition]) -> None:
        self.events.append("revoked")


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions over what several tasks collect
            await asyncio.sleep(0.05)


async def create(bus: KafkaBus, name: str, partitions: int) -> None:
    admin = await bus.admin()
    await admin.create([Topic(name=name, partitions=partitions, retention_ms=3_600_000)])
    await admin.stop()


async def test_a_killed_broker_costs_nothing_but_time(
    mortal: RunningBroker, opened: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    bus = KafkaBus(mortal.cluster, SystemClock())
    await create(bus, "t", 3)
    producers = [await bus.producer(client_id=f"p{n}") for n in range(3)]
    writers = [Writer(p, Partition("t", n % 3), f"w{n}") for n, p in enumerate((*producers, *producers))]
    reader, told = await bus.reader(), Follow()
    await reader.assign({Partition("t", n): "earliest" for n in range(3)})
    member = await bus.member("g", ["t"], told, instance_id="engine-0", session_timeout_ms=10_000)
    for part in (*producers, reader, member):
        opened.push_async_callback(part.stop)
    read: dict[int, list[tuple[int, str]]] = defaultdict(list)
    got: dict[int, list[int]] = defaultdict(list)

    async def follow() -> None:
        while True:
            for record in await reader.poll(100):
                read[record.partition].append((record.offset, (record.value or b"").decode()))

    async def attend() -> None:
        while True:
            for record in await member.poll(100):
                got[record.partition].append(record.offset)

    for work in (follow(), attend(), *(w.run() for w in writers)):
        opened.callback(asyncio.create_task(work).cancel)
    await until(lambda: all(len(w.acked) > 300 for w in writers) and len(got) == 3, 30)
    mortal.signal(signal.SIGKILL)
    await asyncio.sleep(2)
    answers = await asyncio.gather(
        reader.end_offsets([Partition("t", 0)]),
        member.commit({Partition("t", 0): Commit(offset=1)}),
        member.committed(Partition("t", 0)),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [Unavailable] * 3
    mortal.launch()
    await mortal.serving()
    at_return = [len(w.acked) for w in writers]
    await until(lambda: all(len(w.acked) > n + 100 for w, n in zip(writers, at_return, strict=True)), BACK_WITHIN_S)
    await member.commit({Partition("t", 0): Commit(offset=1)})
    for writer in writers:
        writer.going = False
    await asyncio.wait([ack for writer in writers for ack in writer.acks], timeout=BACK_WITHIN_S)
    ends = await reader.end_offsets([Partition("t", n) for n in range(3)])
    await until(lambda: all(len(read[n]) == ends[Partition("t", n)] == len(got[n]) for n in range(3)), BACK_WITHIN_S)

    for writer in writers:
        mine = [(o, int(v.split()[1])) for o, v in read[writer.at.partition] if v.startswith(writer.name + " ")]
        numbers = [number for _, number in mine]
        assert numbers == sorted(set(numbers)), "once each, in the order of the calls"
        offsets = {number: offset for offset, number in mine}
        assert {n: offsets.get(n) for n in writer.acked} == writer.acked, "everything acknowledged, where it was said"
        assert set(offsets) <= set(writer.acked) | writer.unknown
        assert set(writer.acked) | writer.unknown == set(range(writer.sent)), "every send has an outcome"
    for n in range(3):
        assert [offset for offset, _ in read[n]] == list(range(ends[Partition("t", n)]))
        assert got[n] == list(range(ends[Partition("t", n)]))
    assert not any(w.unknown for w in writers), "the log was only away"
    assert told.events == ["assigned"], "an outage shorter than the session moves nothing"
    assert len(caplog.records) < 20, "an outage doesn't flood the logs"


async def test_a_frozen_broker_fills_the_queue_and_stops_nobody(mortal: RunningBroker, opened: AsyncExitStack) -> None:
    bus = KafkaBus(mortal.cluster, SystemClock(), queue_bytes=100_000)
    await create(bus, "frozen", 1)
    here = Partition("frozen", 0)
    patient, hasty, reader = await bus.producer(), await bus.producer(), await bus.reader()
    for part in (patient, hasty, reader):
        opened.push_async_callback(part.stop)
    for producer in (patient, hasty):
        await (await producer.send("frozen", b"before"))
    await reader.assign({here: "latest"})
    mortal.signal(signal.SIGSTOP)
    try:
        stranger = await bus.producer()
        opened.push_async_callback(stranger.stop)
        began_s = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(stranger.send("frozen", b"v") for _ in range(20)), return_exceptions=True)
        assert all(isinstance(answer, Unavailable) for answer in answers)
        assert asyncio.get_running_loop().time() - began_s < 15, "all are told together, not one after the other"
        waiting = [await patient.send("frozen", b"%d" % n + bytes(10_000)) for n in range(9)]
        with pytest.raises(Unavailable, match="queue is full"):
            await patient.send("frozen", bytes(10_000))
        assert await reader.poll(200) == []
        with pytest.raises(Unavailable):
            await reader.end_offsets([here])
        given_up = await hasty.send("frozen", b"given up")
        await hasty.stop()
        with pytest.raises(SendUnknown):
            await given_up
    finally:
        mortal.signal(signal.SIGCONT)
    assert await asyncio.wait_for(asyncio.gather(*waiting), BACK_WITHIN_S)
    seen: list[bytes] = []
    async with asyncio.timeout(BACK_WITHIN_S):
        while len([value for value in seen if value != b"given up"]) < 9:
            seen += [record.value or b"" for record in await reader.poll(100)]
    assert [value[:1] for value in seen if value != b"given up"] == [b"%d" % n for n in range(9)]
    assert seen.count(b"given up") <= 1
