"""The control process on a real broker: signals in, weights out, through the broker's death and return."""

from __future__ import annotations

import asyncio
import os
import signal as signals
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import faust
import msgspec
import pytest
from kafka_broker import RunningBroker
from routing_world import signal

from aggregator.app import keep_running
from aggregator.control import build
from wire.bus import Partition, Producer, Record
from wire.clock import SystemClock
from wire.codec import decode, encode
from wire.errors import BusError
from wire.fleet import Fleet
from wire.follow import Follower, dead_letters
from wire.kafka import KafkaBus
from wire.messages import Dead, DemandSignal, EngineSignal, EngineState, Snapshot
from wire.settings import Cluster, Settings
from wire.topics import DEAD, SIGNALS, WEIGHTS, shared_topics, weights_key

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]

CLOCK = SystemClock()
SIGNAL_EVERY_S = 0.5


class Control:
    """`python -m aggregator control` as a process."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._log = directory / "control.log"
        mine = {
            "MILLSTREAM_REGIONS": msgspec.json.encode({"local": cluster}).decode(),
            "MILLSTREAM_STATE_DIR": str(directory),
            "MILLSTREAM_SNAPSHOT_INTERVAL_MS": "500",
        }
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("MILLSTREAM_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aggregator", "control"], env=inherited | mine, stderr=log, stdout=log
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    async def ended(self, within_s: float) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), within_s)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class World:
    """Engines of one model of this test's own, and an ingress, that signal; and the weights that come back."""

    model: str
    fleet: Fleet
    weights: Follower[Snapshot]
    engines: dict[str, EngineSignal] = field(default_factory=dict)

    def engine(self, name: str, state: EngineState = "ready", pool: str = "gpu") -> None:
        """From now on this engine says this."""
        fleet = msgspec.structs.replace(self.fleet, pool=pool)
        shard = sorted({*self.engines, name}).index(name)
        self.engines[name] = signal(engine=name, model=self.model, fleet=fleet, shards=(shard,), state=state)

    @property
    def snapshot(self) -> Snapshot | None:
        return self.weights.items.get(weights_key(self.model, "local").decode())

    @property
    def created_ms(self) -> int:
        return self.snapshot.created_ms if self.snapshot is not None else 0

    def routed(self) -> set[str]:
        return {route.engine for route in self.snapshot.routes} if self.snapshot is not None else set()

    async def say(self, producer: Producer) -> None:
        while True:
            alive = DemandSignal(
                ingress="test", slot=0, incarnation="a", region="local", model="", at_ms=CLOCK.now_ms()
            )
            with suppress(BusError):
                for one in [alive, *self.engines.values()]:
                    now = msgspec.structs.replace(one, at_ms=CLOCK.now_ms())
                    await producer.send(SIGNALS, encode(now))
            await asyncio.sleep(SIGNAL_EVERY_S)


async def until(condition: Callable[[], bool], what: str, within_s: float = 90.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - what is waited for is another process
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"it never came to this: {what}")


@pytest.fixture
async def world(kafka_bus: KafkaBus, fleet: Fleet) -> AsyncIterator[World]:
    admin = await kafka_bus.admin()
    await admin.create(shared_topics())
    await admin.stop()
    producer = await kafka_bus.producer(acks="leader")
    weights: Follower[Snapshot] = Follower(
        kafka_bus, WEIGHTS, Snapshot, clock=CLOCK, dead=dead_letters(producer, "test", CLOCK)
    )
    await weights.start()
    made = World(fleet.slug, fleet, weights)
    saying = asyncio.create_task(made.say(producer))
    yield made
    saying.cancel()
    await asyncio.wait({saying})
    await weights.stop()
    await producer.stop()


@pytest.fixture
def control(broker: RunningBroker, tmp_path: Path) -> Iterator[Control]:
    process = Control(broker.cluster, tmp_path)
    yield process
    process.end()


async def test_weights_come_again_and_again_and_follow_the_engines(world: World, control: Control) -> None:
    world.engine("a")
    world.engine("b")
    await until(lambda: world.routed() == {"a", "b"}, "both engines are routed to")
    first = world.snapshot
    assert first is not None
    assert sum(route.weight for route in first.routes) == pytest.approx(1)
    await until(lambda: world.snapshot is not None and world.snapshot.version > first.version, "a newer snapshot")

    del world.engines["b"]
    await until(lambda: world.routed() == {"a"}, "the silent engine gets nothing")
    del world.engines["a"]
    await until(lambda: world.routed() == set(), "with no engine left there is no route")
    assert world.snapshot is not None
    assert world.snapshot.why == "no engine has been heard of lately"

    control.process.terminate()
    assert await control.ended(within_s=20) == 0
    assert "Traceback" not in control.text


async def test_a_ready_gpu_engine_beats_the_cpu_pool_which_takes_over_when_it_fails(
    world: World, control: Control
) -> None:
    world.engine("gpu", "loading")
    world.engine("cpu", pool="cpu")
    await until(lambda: world.routed() == {"cpu"}, "the CPU pool serves while the GPU engine loads")
    assert world.snapshot is not None
    assert world.snapshot.fallback == 1.0
    world.engine("gpu", "ready")
    await until(lambda: world.routed() == {"gpu"}, "the GPU engine serves when it is ready")
    world.engine("gpu", "failed")
    await until(lambda: world.routed() == {"cpu"}, "the CPU pool serves again")


async def test_what_cannot_be_decoded_goes_to_dead_and_holds_nothing_up(
    world: World, control: Control, kafka_bus: KafkaBus
) -> None:
    world.engine("a")
    await until(lambda: world.routed() == {"a"}, "the engine is routed to")
    reader, producer = await kafka_bus.reader(), await kafka_bus.producer()
    await reader.assign({Partition(DEAD, 0): "latest"})
    offset = await (await producer.send(SIGNALS, b"no signal"))
    found: list[Dead] = []
    async with asyncio.timeout(30):
        while not any(dead.offset == offset and dead.reader == "control" for dead in found):
            found += [decode(record.value, Dead) for record in await reader.poll(500)]
    await until(lambda: world.snapshot is not None and world.snapshot.version > offset, "it read on")
    await reader.stop()
    await producer.stop()


async def test_one_process_outlives_the_broker_and_ends_without_it(
    world: World, broker: RunningBroker, tmp_path: Path
) -> None:
    world.engine("a")
    world.engine("b")
    broker.signal(signals.SIGKILL)
    control = Control(broker.cluster, tmp_path)
    try:
        await until(lambda: "is built anew" in control.text, "control can't start yet")
        await back(broker)
        await until(lambda: world.routed() == {"a", "b"}, "both engines are routed to")

        broker.signal(signals.SIGKILL)
        await asyncio.sleep(13)  # longer than the group's session
        await back(broker)
        back_ms = CLOCK.now_ms()
        await until(lambda: world.created_ms > back_ms, "weights come again")
        await until(lambda: world.routed() == {"a", "b"}, "both engines are routed to again")
        assert control.process.poll() is None

        broker.signal(signals.SIGKILL)
        await asyncio.sleep(1)
        control.process.terminate()
        assert await control.ended(within_s=20) == 0
    finally:
        control.end()
        broker.signal(signals.SIGKILL)
        await back(broker)  # for the tests that come after


async def back(broker: RunningBroker) -> None:
    broker.launch()
    await broker.serving(within_s=120)


async def test_a_crashed_app_is_built_anew(world: World, broker: RunningBroker, tmp_path: Path) -> None:
    settings = Settings(regions={"local": broker.cluster}, state_dir=tmp_path)
    heard: list[int] = []
    apps: list[faust.App] = []

    async def hear(record: Record) -> None:
        heard.append(record.offset)

    def make() -> faust.App:
        apps.append(build(settings, hear))
        return apps[-1]

    stop = asyncio.Event()
    running = asyncio.create_task(keep_running(make, stop))
    await until(lambda: bool(heard), "signals are heard")
    await apps[-1].crash(RuntimeError("for the test"))
    before = len(heard)
    await until(lambda: len(apps) == 2 and len(heard) > before + 3, "signals are heard again")
    assert heard == sorted(heard)
    stop.set()
    await asyncio.wait_for(running, 30)
