"""The producer: checks, bounds and orders what is sent; `wire.kafka_produce` delivers it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from aiokafka.protocol.admin import DescribeConfigsRequest

from wire.bus import Partition
from wire.clock import Clock
from wire.errors import Unavailable
from wire.kafka_link import Code, Link
from wire.kafka_offsets import check_code
from wire.kafka_produce import Delivery, Pending
from wire.records import check_record, partition_of
from wire.topics import LARGE_MESSAGE_BYTES, Acks

_log = logging.getLogger(__name__)

QUEUE_BYTES = 64 * 1024 * 1024
LAYOUT_WITHIN_S = 3.0
STOP_WITHIN_S = 5.0
_TOPIC = 2
"""the kind of resource that DescribeConfigs calls a topic"""


@dataclass(frozen=True, slots=True)
class Layout:
    """What must be known of a topic before a record can be queued."""

    partitions: int
    limit_bytes: int


class KafkaProducer:
    """Sends in the order of the calls; see `wire.bus.Producer`."""

    def __init__(self, link: Link, acks: Acks, linger_ms: int, clock: Clock, queue_bytes: int = QUEUE_BYTES) -> None:
        self._link = link
        self._acks = acks
        self._linger_ms = linger_ms
        self._clock = clock
        self._queue_bytes = queue_bytes
        self._loop = asyncio.get_running_loop()
        self._layouts: dict[str, Layout] = {}
        self._missed_s: dict[str, float] = {}
        self._learning = asyncio.Lock()
        self._learners = 0
        self._next_partition = 0
        self._stopped = False
        self._ended: list[Delivery] = []
        self._delivery: Delivery | None = self._begin()

    async def send(
        self, topic: str, value: bytes | None, *, key: bytes | None = None, partition: int | None = None
    ) -> asyncio.Future[int]:
        layout = self._layouts.get(topic)
        if layout is None or self._learners or (partition is not None and partition >= layout.partitions):
            asked_s = self._loop.time()
            self._learners += 1  # whoever comes while one waits must wait behind it, or it would overtake
            try:
                async with self._learning:
                    layout = await self._learn(topic, partition, asked_s)
                    return self._queue(layout, topic, value, key, partition)
            finally:
                self._learners -= 1
        return self._queue(layout, topic, value, key, partition)

    async def flush(self) -> None:
        if self._delivery is not None:
            await self._delivery.flush()

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._delivery is not None:
            try:
                await asyncio.wait_for(self._delivery.flush(), STOP_WITHIN_S)
            except TimeoutError:
                _log.warning("the producer stops with unacknowledged records; their outcome is unknown")
        if self._delivery is not None:
            self._delivery.fail("the producer was stopped")
        for delivery in self._ended:
            await delivery.closed()
        await self._link.close()

    def _begin(self) -> Delivery:
        return Delivery(self._link, self._acks, self._linger_ms, self._end)

    def _end(self, delivery: Delivery) -> None:
        self._delivery = None
        self._ended = [*self._ended[-1:], delivery]

    def _queue(
        self, layout: Layout, topic: str, value: bytes | None, key: bytes | None, partition: int | None
    ) -> asyncio.Future[int]:
        if self._stopped:
            raise Unavailable("the producer is stopped")
        size = check_record(topic, key, value, partition, layout.partitions, layout.limit_bytes)
        if self._delivery is None:
            self._delivery = self._begin()
        if self._delivery.queued_bytes + size > self._queue_bytes:
            raise Unavailable("the log is away and the queue is full")
        if partition is None:
            partition = self._choose(key, layout.partitions)
        ack: asyncio.Future[int] = self._loop.create_future()
        record = Pending(key, value, self._clock.now_ms(), size, self._loop.time(), ack)
        self._delivery.put(Partition(topic, partition), layout.limit_bytes, record)
        return ack

    def _choose(self, key: bytes | None, partitions: int) -> int:
        if key is not None:
            return partition_of(key, partitions)
        self._next_partition += 1
        return self._next_partition % partitions

    async def _learn(self, topic: str, partition: int | None, asked_s: float) -> Layout:
        known = self._layouts.get(topic)
        if known is not None and (partition is None or partition < known.partitions):
            return known
        if self._missed_s.get(topic, asked_s) > asked_s:
            raise Unavailable(f"the layout of topic {topic} could not be learnt while this record waited for it")
        try:
            async with asyncio.timeout(LAYOUT_WITHIN_S):
                partitions = await self._link.learn(topic, LAYOUT_WITHIN_S)
                layout = Layout(partitions, known.limit_bytes if known else await self._limit(topic))
        except (Unavailable, TimeoutError) as exc:
            # for all that wait: each asking for itself, one after the other, would wait for minutes
            self._missed_s[topic] = self._loop.time()
            raise Unavailable(f"the layout of topic {topic} can't be learnt: {exc}") from exc
        self._layouts[topic] = layout
        return layout

    async def _limit(self, topic: str) -> int:
        """The topic's max.message.bytes."""

        async def ask() -> int:
            request = DescribeConfigsRequest([(_TOPIC, topic, ["max.message.bytes"])])
            for code, _, _, _, entries in (await self._link.ask_any(request)).resources:
                if code == Code.NONE:
                    return int(entries[0][1])
                if code != Code.UNKNOWN_TOPIC_OR_PARTITION:
                    check_code(code, f"the settings of topic {topic}")
            return LARGE_MESSAGE_BYTES  # unknown: asking for its partitions will tell

        return await self._link.insist(ask, LAYOUT_WITHIN_S)
