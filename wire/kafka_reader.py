"""The reader: partitions by hand, no group; see `wire.bus.Reader`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wire import kafka_offsets
from wire.bus import Partition, Record, Start
from wire.kafka_fetch import Fetcher
from wire.kafka_link import Link


class KafkaReader:
    """Positions are fixed when `assign` returns, and survive the log's being away."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._fetcher = Fetcher(link)

    async def assign(self, starts: Mapping[Partition, Start]) -> None:
        self._fetcher.assign(await kafka_offsets.resolve(self._link, starts))

    async def poll(self, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        return await self._fetcher.poll(timeout_ms, max_records)

    def position(self, partition: Partition) -> int:
        position = self._fetcher.position(partition)
        assert position is not None, "assign gives every partition a position"
        return position

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await kafka_offsets.end_offsets(self._link, partitions)

    async def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await kafka_offsets.beginning_offsets(self._link, partitions)

    async def stop(self) -> None:
        await self._fetcher.stop()
        await self._link.close()
