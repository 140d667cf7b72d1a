"""The bare trip: produce, echo in another process, consume, by the same bus and the same broker as the pipeline.

`python -m millstream.bench.bare BOOTSTRAP` is the other process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from wire.bus import Bus, Partition, Producer, Reader
from wire.clock import SystemClock
from wire.kafka import KafkaBus
from wire.settings import Cluster
from wire.topics import Topic

ASKED, ANSWERED = "bench.asked", "bench.answered"
_READY = b"ready\n"
_GIVE_UP_S = 30.0
_MINUTES_10_MS = 600_000


class Trip:
    """Sends a record and waits until it comes back."""

    def __init__(self, producer: Producer, reader: Reader) -> None:
        self._producer = producer
        self._reader = reader

    async def measure(self, value: bytes) -> float:
        """One trip, in milliseconds."""
        began = time.perf_counter()
        await self._producer.send(ASKED, value, partition=0)
        async with asyncio.timeout(_GIVE_UP_S):
            while not await self._reader.poll(1_000):
                pass
        return (time.perf_counter() - began) * 1000


@asynccontextmanager
async def bare_trip(bus: Bus, bootstrap: str) -> AsyncIterator[Trip]:
    """Topics, the echoing process, and this side's producer (acks=all, as for requests) and reader."""
    admin = await bus.admin()
    await admin.create(Topic(name=name, partitions=1, retention_ms=_MINUTES_10_MS) for name in (ASKED, ANSWERED))
    await admin.stop()
    producer, reader = await bus.producer(), await bus.reader()
    await reader.assign({Partition(ANSWERED, 0): "latest"})
    echo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millstream.bench.bare", bootstrap), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert echo.stdout is not None
        await asyncio.wait_for(echo.stdout.readline(), _GIVE_UP_S)
        yield Trip(producer, reader)
    finally:
        if echo.returncode is None:
            echo.terminate()
        await echo.wait()
        await reader.stop()
        await producer.stop()


async def _echo(bootstrap: str) -> None:
    bus = KafkaBus(Cluster(bootstrap=bootstrap, replication=1), SystemClock())
    producer, reader = await bus.producer(acks="leader"), await bus.reader()
    await reader.assign({Partition(ASKED, 0): "latest"})
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    while True:
        for record in await reader.poll(1_000):
            await producer.send(ANSWERED, record.value, partition=0)


if __name__ == "__main__":
    asyncio.run(_echo(sys.argv[1]))
