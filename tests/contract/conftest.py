"""The worlds that the contract is held in."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from bus_world import World

from wire.clock import ManualClock
from wire.kafka import KafkaBus
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.kafka)])
async def world(request: pytest.FixtureRequest, suffix: str) -> AsyncIterator[World]:
    """The same log in memory and on the real broker."""
    clock = ManualClock(int(time.time() * 1000))
    if request.param == "memory":
        log = MemoryLog(clock)
        world = World(lambda: MemoryBus(log), clock, suffix)
    else:
        broker = request.getfixturevalue("broker")
        world = World(lambda: KafkaBus(broker.cluster, clock), clock, suffix)
    yield world
    await world.close()
