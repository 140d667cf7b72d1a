"""Two regions on two clusters: a request goes where there is an engine, and its answer comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from ingress_world import CATALOGUE, CREDENTIALS, KEY, MODEL, SECRET, chat_body, credential, eventually, model

from aggregator.control import tick
from aggregator.publish import Publisher
from aggregator.windows import Windows
from ingress.service import Ingress, build
from routing.plan import Network
from wire.clock import SystemClock
from wire.codec import encode
from wire.fleet import Fleet
from wire.follow import Tail, dead_letters
from wire.kafka import buses_of
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import ModelVersion, Signal
from wire.settings import Cluster, Settings
from wire.topics import SIGNALS, all_topics
from workers.worker import Worker

REGIONS = ("here", "there")
CLUSTERS = {region: Cluster(bootstrap=f"{region}:9092") for region in REGIONS}
VERSION = ModelVersion(version="1", numerics="sim", pools=("cpu",), regions=REGIONS)


def settings(**changes: Any) -> Settings:
    known = {
        "region": "here",
        "regions": CLUSTERS,
        "key_secret": SECRET,
        "slots": 2,
        "engine": "engine-there",
        "engine_kind": "simulated",
        "engine_slots": 4,
        "model": MODEL,
        "numerics": "sim",
        "simulated_ttft_ms": 1.0,
        "simulated_tbt_ms": 3.0,
        "drain_timeout_ms": 500,
        "orphan_grace_ms": 4_000,
        "snapshot_interval_ms": 100,
    }
    return Settings(**{**known, **changes})


class World:
    """Each region's log, and an ingress here; workers are hired."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.clock = SystemClock()
        self.logs = {region: MemoryLog(self.clock) for region in REGIONS}
        self.buses = {region: MemoryBus(log) for region, log in self.logs.items()}
        self._stack = stack

    async def open(self, **changes: Any) -> None:
        bus = self.buses["here"]
        for other in self.buses.values():
            admin = await other.admin()
            fleets = [(Fleet(region, "cpu", "org-tiny-model", "1", "sim"), 1) for region in REGIONS]
            await admin.create(all_topics(fleets, [(region, 2) for region in REGIONS]))
        producer = await bus.producer()
        for topic, key, message in (
            (CREDENTIALS, "dev", credential()),
            (CATALOGUE, MODEL, model(versions=(VERSION,))),
        ):
            await (await producer.send(topic, encode(message), key=key.encode(), partition=0))
        mine = settings(**changes)
        self.ingress: Ingress = await build(mine, self.buses, self.clock)
        await self.ingress.open()
        self._stack.push_async_callback(self.ingress.close)
        transport = httpx.ASGITransport(self.ingress.app)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://here", headers={"Authorization": f"Bearer {KEY}"}, timeout=20
        )
        self._stack.push_async_callback(self.client.aclose)
        windows = Windows(Network(trips_ms=mine.between_ms(), forbidden=mine.forbidden()))
        tail = Tail[Signal](
            bus,
            SIGNALS,
            Signal,
            lambda signal, record: windows.hear(signal, record.offset, self.clock.now_ms()),
            dead=dead_letters(producer, "control", self.clock),
        )
        await tail.start()
        self._stack.push_async_callback(tail.stop)
        ticking = asyncio.create_task(tick(mine, windows, Publisher(producer), self.clock))
        self._stack.callback(ticking.cancel)

    async def hire(self, region: str) -> None:
        stopping = asyncio.Event()
        worker = Worker(settings(region=region, engine=f"engine-{region}"), self.buses, self.clock)
        working = asyncio.create_task(worker.run(stopping))

        async def leave() -> None:
            stopping.set()
            await working

        self._stack.push_async_callback(leave)

    async def until_routed_to(self, region: str) -> None:
        """And nowhere else."""

        async def known() -> bool:
            return self.routed() == {region} and not self.ingress.missing()

        await eventually(known)

    def routed(self) -> set[str]:
        """The regions that requests from here go to."""
        snapshot = self.ingress._router._weights.snapshots.get(MODEL)
        return set() if snapshot is None else {route.fleet.region for route in snapshot.routes if route.weight > 0}


@asynccontextmanager
async def opened(**changes: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        world = World(stack)
        await world.open(**changes)
        yield world


async def test_a_region_without_an_engine_is_served_by_another() -> None:
    async with opened() as world:
        await world.hire("there")
        await world.until_routed_to("there")
        answers = await asyncio.gather(
            *(world.client.post("/v1/chat/completions", json=chat_body(max_tokens=5, seed=n)) for n in range(4))
        )
        assert [answer.status_code for answer in answers] == [200] * 4
        assert all(answer.json()["usage"]["completion_tokens"] == 5 for answer in answers)


async def test_an_answer_longer_than_the_grace_of_orphans_is_not_cancelled() -> None:
    """The worker there hears that this ingress lives."""
    async with opened() as world:
        await world.hire("there")
        await world.until_routed_to("there")
        answer = await world.client.post("/v1/chat/completions", json=chat_body(max_tokens=1_800, ignore_eos=True))
        assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_requests_stay_while_there_is_room_at_home() -> None:
    async with opened() as world:
        for region in REGIONS:
            await world.hire(region)
        await world.until_routed_to("here")
        for n in range(6):
            answer = await world.client.post("/v1/chat/completions", json=chat_body(max_tokens=2, seed=n))
            assert answer.status_code == 200
        assert world.routed() == {"here"}


async def test_a_region_whose_requests_must_stay_sends_none_away() -> None:
    async with opened(residency=("here",), accept_timeout_ms=700, request_timeout_ms=1_500) as world:
        await world.hire("there")

        async def known() -> bool:
            return world.ingress._router.engine_known()

        await eventually(known)
        answer = await world.client.post("/v1/chat/completions", json=chat_body(max_tokens=2))
        assert answer.status_code in (503, 504)
        assert world.routed() == set()


def test_regions_of_one_cluster_share_a_bus() -> None:
    one, again = Cluster(bootstrap="127.0.0.1:1"), Cluster(bootstrap="127.0.0.1:1")
    buses = buses_of(settings(regions={"here": one, "there": again, "far": CLUSTERS["there"]}), SystemClock())
    assert buses["here"] is buses["there"]
    assert buses["far"] is not buses["here"]
